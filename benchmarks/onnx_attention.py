"""The attention of ONNX Runtime, as a model of one operator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.registry import CaseUnavailableError


def onnx_attention(q: Tensor, k: Tensor, v: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Full causal attention of tensors like these, float32 on a CPU, in as many threads as PyTorch has.

    Raises:
        CaseUnavailableError: onnx and onnxruntime are not installed, or they do not know it.
    """
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError as error:
        raise CaseUnavailableError("it needs the packages onnx and onnxruntime") from error
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, list(x.shape))
        for name, x in (("q", q), ("k", k), ("v", v))
    ]
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, [*q.shape[:3], v.shape[3]])
    node = helper.make_node("Attention", ["q", "k", "v"], ["out"], is_causal=1)  # of ONNX since opset 23
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of an ONNX Runtime without this operator
        raise CaseUnavailableError(f"this ONNX Runtime cannot run it ({type(error).__name__})") from error

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (out,) = session.run(None, {"q": q.numpy(), "k": k.numpy(), "v": v.numpy()})
        return torch.from_numpy(out)

    return attend
