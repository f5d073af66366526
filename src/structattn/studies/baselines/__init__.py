"""Attention variants of other papers that are no scoring and layout, as specs that every model here takes."""

from structattn.spec.attention import add_form
from structattn.studies.baselines import delta, mla, pooled, recent, tpa

FORMS = {
    "gated-delta": delta.FORM,
    "mla": mla.FORM,
    "pooled": pooled.FORM,
    "recent": recent.FORM,
    "tpa": tpa.FORM,
}


def add_forms() -> None:
    """Adds their text forms to those that specs have; more than once is as good as once."""
    for name, form in FORMS.items():
        add_form(name, form)
