"""Times a decoding step of a Llama beside llama.cpp's: the same weights, and caches of as many bits.

All caches are filled first, then their steps take turns. Run it as

    OMP_NUM_THREADS=1 python time_llama_cpp.py MODEL --context 2048 8192 --out rows.csv

with the folder of a Llama. It needs the packages llama-cpp-python, compiled for this machine, and gguf.
"""

import argparse
import csv
import statistics
import tempfile
import time
from copy import deepcopy
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import structattn as sa
from structattn.integrations.transformers import level_cache, structurize
from structattn.integrations.transformers.caches.model_cache import CACHE
from structattn.progress import counted

STEPS, WARM = 40, 8
KINDS = {16: llama_cpp.GGML_TYPE_F16, 8: llama_cpp.GGML_TYPE_Q8_0, 4: llama_cpp.GGML_TYPE_Q4_0}
FILES = {torch.float32: gguf.LlamaFileType.ALL_F32, torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model, path) -> None:
    """A file that llama.cpp reads, with the weights of a Llama whose embeddings are those of its output."""
    config, heads = model.config, model.config.num_attention_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(FILES[model.dtype])
    writer.add_tokenizer_model("none")

    def add(name, weight) -> None:
        if weight.dim() == 2 and model.dtype == torch.bfloat16:
            numbers = weight.contiguous().view(torch.int16).numpy().view(np.uint8)
            writer.add_tensor(name, numbers, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, weight.float().numpy())

    add("token_embd.weight", model.model.embed_tokens.weight.detach())
    add("output_norm.weight", model.model.norm.weight.detach())
    for number, layer in enumerate(model.model.layers):
        for ours, theirs in NAMES.items():
            weight = layer.get_submodule(ours).weight.detach()
            if theirs in ("attn_q", "attn_k"):  # rotary pairs are neighbours there, and half a head apart here
                count = heads if theirs == "attn_q" else config.num_key_value_heads
                weight = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
            add(f"blk.{number}.{theirs}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Theirs:
    """A model and a cache of llama.cpp."""

    def __init__(self, path, bits, length, threads) -> None:
        self.model = llama_cpp.Llama(
            str(path),
            n_ctx=length,
            n_threads=threads,
            n_threads_batch=threads,
            type_k=KINDS[bits],
            type_v=KINDS[bits],
            flash_attn=True,
            verbose=False,
        )

    def __call__(self, ids):
        """The logits after more tokens."""
        self.model.eval(ids)
        found = llama_cpp.llama_get_logits_ith(self.model.ctx, -1)
        return torch.from_numpy(np.ctypeslib.as_array(found, (self.model.n_vocab(),)).copy())


class Ours:
    """A model of transformers with a cache."""

    def __init__(self, model, cache) -> None:
        self.model, self.cache = model, {CACHE: cache}

    def __call__(self, ids):
        """The logits after more tokens."""
        return self.model(torch.tensor([ids]), logits_to_keep=1, **self.cache).logits[0, -1].float()


def variants(model, folder, length, threads):
    """By name and bits; all have room for ``length`` tokens."""
    yield "transformers, default cache", 16, Ours(model, DynamicCache(config=model.config))
    for bits in KINDS:
        storage = None if bits == 16 else sa.Storage(bits, bits)
        own = structurize(deepcopy(model), "standard", storage=storage)
        yield "structattn", bits, Ours(own, level_cache(own, max_length=length))
    path = Path(folder) / "model.gguf"
    write_gguf(model, path)
    for bits in KINDS:
        yield "llama.cpp", bits, Theirs(path, bits, length, threads)


def rows_of(model, length, folder):
    """How far logits are from those of transformers, and the milliseconds of a step after ``length``."""
    ids = torch.randint(model.config.vocab_size, (length + STEPS,), generator=torch.Generator().manual_seed(0)).tolist()
    found = list(variants(model, folder, -(-(length + STEPS) // 256) * 256, torch.get_num_threads()))
    logits = [run(ids[:length]) for _, _, run in found]
    times = [[] for _ in found]
    for at in range(length, length + STEPS):
        for (_, _, run), own in zip(found, times, strict=True):
            start = time.perf_counter()
            run(ids[at : at + 1])
            own.append(1000 * (time.perf_counter() - start))
    for (name, bits, _), own, ms in zip(found, logits, times, strict=True):
        difference = float((own - logits[0]).norm() / logits[0].norm())
        yield name, bits, round(difference, 4), round(statistics.median(ms[WARM:]), 2)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    with Path(arguments.out).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["dtype", "context", "cache", "bits", "difference", "ms"])
        for dtype in (torch.bfloat16, torch.float32):
            model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
            for length in arguments.context:
                with tempfile.TemporaryDirectory() as folder:
                    for row in counted(rows_of(model, length, folder), f"{dtype}, {length} tokens"):
                        rows.writerow([str(dtype).removeprefix("torch."), length, *row])
                        file.flush()


if __name__ == "__main__":
    main()
