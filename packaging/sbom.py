"""A bill of materials (CycloneDX 1.7) for a wheel, put where PEP 770 says: `.dist-info/sboms/NAME.cdx.json`.

It says what is in the wheel beside the Python code, which is all ours: compiled libraries, with their
SHA-256, their compiler and the system libraries that they need, and data of others, with their licenses. And
it says what is not in it and pip installs besides: every requirement, with its versions.

It is read from the wheel alone, so the same wheel has the same bill.
"""

from __future__ import annotations

import base64
import datetime
import email
import hashlib
import io
import sys
import uuid
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from elftools.elf.elffile import ELFFile
from packageurl import PackageURL
from packaging.requirements import Requirement

OURS = ("", ".cpp", ".h", ".j2", ".json", ".md", ".py", ".typed")  # by suffix; what else is in a wheel is listed below
# What others have written: its license, and where it comes from; the README in that folder has more.
_DATA = "structattn_lab/data/files"
_ETT, _PEPS = "https://github.com/zhouhaoyi/ETDataset", "https://github.com/python/peps"
OF_OTHERS = {
    f"{_DATA}/ETTh1.csv": (LicenseExpression("CC-BY-ND-4.0"), _ETT),
    f"{_DATA}/peps.txt": (DisjunctiveLicense(name="public domain, or CC0-1.0"), _PEPS),
}


def described(name: str, content: bytes) -> Component:
    """A file of the wheel."""
    sha256 = HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(content).hexdigest())
    if not name.endswith(".so"):
        license_, url = OF_OTHERS[name]
        source = ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=XsUri(url))
        return Component(
            name=name,
            type=ComponentType.DATA,
            bom_ref=name,
            hashes=[sha256],
            licenses=[license_],
            external_references=[source],
        )
    elf = ELFFile(io.BytesIO(content))
    facts = [("needs", tag.needed) for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
    if (comment := elf.get_section_by_name(".comment")) is not None:
        facts += [("compiler", text.decode()) for text in comment.data().split(b"\0") if text]
    return Component(
        name=name,
        type=ComponentType.FILE,
        bom_ref=name,
        hashes=[sha256],
        licenses=[LicenseExpression("Apache-2.0")],
        properties=[Property(name=f"structattn:{fact}", value=value) for fact, value in facts],
    )


def required(metadata: Message) -> Iterator[Component]:
    """What pip installs with the wheel, and what the wheel's extras add."""
    scopes: dict[str, set[str]] = {}
    always = set()
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        scopes.setdefault(requirement.name, set()).add(line)
        if requirement.marker is None or "extra" not in str(requirement.marker):
            always.add(requirement.name)
    for name, lines in sorted(scopes.items()):
        if name != metadata["Name"]:
            yield Component(
                name=name,
                type=ComponentType.LIBRARY,
                bom_ref=f"pkg:pypi/{name}",
                purl=PackageURL("pypi", name=name),
                scope=ComponentScope.REQUIRED if name in always else ComponentScope.OPTIONAL,
                is_external=True,
                properties=[Property(name="structattn:requirement", value=line) for line in lines],
            )


def make_bill(name: str, files: dict[str, bytes], epoch: int) -> str:
    """The bill of a wheel, from its name, its files and the time of its sources."""
    [place] = (path for path in files if path.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(files[place])
    in_wheel = [path for path in files if ".dist-info/" not in path and Path(path).suffix not in OURS]
    if unknown := {path for path in in_wheel if not path.endswith(".so")} - set(OF_OTHERS):
        sys.exit(f"{name} has files that packaging/sbom.py does not know: {', '.join(sorted(unknown))}")
    purl = PackageURL("pypi", name=metadata["Name"], version=metadata["Version"], qualifiers={"file_name": name})
    wheel = Component(
        name=metadata["Name"],
        version=metadata["Version"],
        type=ComponentType.LIBRARY,
        bom_ref=purl.to_string(),
        purl=purl,
        licenses=[LicenseExpression(metadata["License-Expression"])],
    )
    bill = Bom(
        components=[*(described(path, files[path]) for path in in_wheel), *required(metadata)],
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()),
    )
    bill.metadata.timestamp = datetime.datetime.fromtimestamp(epoch, tz=datetime.UTC)
    bill.metadata.component = wheel
    bill.register_dependency(wheel, bill.components)
    text = make_outputter(bill, OutputFormat.JSON, SchemaVersion.V1_7).output_as_string(indent=1) + "\n"
    if (error := JsonStrictValidator(SchemaVersion.V1_7).validate_str(text)) is not None:
        sys.exit(f"the bill of materials of {name} does not fit its schema: {error}")
    return text


def add_bill(wheel: Path, epoch: int) -> None:
    """Puts its bill into a wheel, in place."""
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
        files = {entry.filename: archive.read(entry) for entry in entries if not entry.is_dir()}
    [record] = (path for path in files if path.endswith(".dist-info/RECORD"))
    folder = record.rpartition("/")[0]
    bill = f"{folder}/sboms/{wheel.name.partition('-')[0]}.cdx.json"
    files[bill] = make_bill(wheel.name, files, epoch).encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(files[bill]).digest()).rstrip(b"=").decode()
    files[record] = files[record].rstrip() + f"\n{bill},sha256={digest},{len(files[bill])}\n".encode()
    old = next(entry for entry in entries if entry.filename == record)
    added = zipfile.ZipInfo(bill, old.date_time)
    added.external_attr = old.external_attr
    with zipfile.ZipFile(wheel, "w") as archive:
        for entry in (*(entry for entry in entries if entry.filename in files), added):
            archive.writestr(entry, files[entry.filename], zipfile.ZIP_DEFLATED)
