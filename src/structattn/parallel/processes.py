"""The processes of a device mesh: the two collectives that context parallelism needs, and one line where
another process is lost.

Keys travel by ``all_to_all_single`` with the sizes of each part: gloo and NCCL both have it, and it is one
collective per pass, so that processes cannot wait for each other in different orders, as they can with single
sends and receives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from structattn.checks import check_type
from structattn.errors import CommunicationError, ConfigError


class Processes:
    """The processes of a mesh, as one of them sees them.

    Attributes:
        index, count: of this process, and how many there are.
        device_type: of the tensors that the mesh is for.

    Raises:
        ConfigError: not a mesh of one dimension that this process is in.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        check_type(
            "mesh",
            mesh,
            DeviceMesh,
            "a torch.distributed.device_mesh.DeviceMesh",
            "init_device_mesh('cpu', (world_size,)) makes one",
        )
        if mesh.ndim != 1:
            remedy = f": take one of its dimensions, as mesh[{mesh.mesh_dim_names[0]!r}]" if mesh.mesh_dim_names else ""
            raise ConfigError(f"the mesh must have one dimension, got {mesh.ndim}{remedy}")
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ConfigError(f"this process, {dist.get_rank()}, is not one of the mesh {mesh.mesh.tolist()}")
        self.index, self.count, self.device_type = coordinate[0], mesh.size(), mesh.device_type
        self._group = mesh.get_group()

    def gathered(self, x: Tensor) -> Tensor:
        """A tensor of the same shape in all processes, from all of them: (count, *shape)."""
        tensors = [torch.empty_like(x) for _ in range(self.count)]
        with self._named_loss():
            dist.all_gather(tensors, x, group=self._group)
        return torch.stack(tensors)

    def summed(self, x: Tensor) -> Tensor:
        """The sum over all processes of a tensor of the same shape, on its device and without a gradient."""
        total = x.detach().to(self.device_type, copy=True)
        with self._named_loss():
            dist.all_reduce(total, group=self._group)
        return total.to(x.device)

    def exchange(self, sent: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Exchange:
        """Starts to send numbers to each process, and to get some from each.

        Args:
            sent: (sum of ``send_sizes``,), what goes to process 0, then to process 1, and so on.
            send_sizes, receive_sizes: how many numbers each process gets, and how many come from each.
        """
        received = sent.new_empty(sum(receive_sizes))
        with self._named_loss():
            work = dist.all_to_all_single(
                received, sent, list(receive_sizes), list(send_sizes), group=self._group, async_op=True
            )
        return Exchange(self, sent, received, work)

    @contextlib.contextmanager
    def _named_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CommunicationError(
                f"process {self.index} of {self.count} (counted from 0) lost the others: one has ended, or has not "
                "answered within the timeout of the process group, which init_process_group(timeout=...) sets "
                f"({reason})"
            ) from error


class Exchange:
    """Numbers under way."""

    def __init__(self, processes: Processes, sent: Tensor, received: Tensor, work: dist.Work) -> None:
        self._processes, self._sent, self._received, self._work = processes, sent, received, work

    def wait(self) -> Tensor:
        """What came, from process 0, then from process 1, and so on.

        Raises:
            CommunicationError: another process was lost.
        """
        with self._processes._named_loss():
            self._work.wait()
        return self._received
