"""A storm of requests on the server: ``python -m benchmarks.storm --minutes 10``.

Starts ``python -m structattn.serve --continuous-batching`` with a tiny structurized model, and an ``openai``
client that keeps two hundred requests of random lengths streaming, half of which begin as an earlier one
does, and leaves a random quarter of them in the middle. It compares the tokens of all others with
``generate()``, and at the end the number of free pages with that of the pool, and the memory of the server
with what it was after a tenth of the time. It prints what it found, and exits with 1 if anything is wrong.

The server runs in a thread of this process, so that its pages can be counted; needs the extra ``serve``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from structattn.cache.paged import PagedCache, PagePool, Tokens

VOCABULARY = 50
LONGEST, MOST_NEW = 100, 40
AT_ONCE = 200
REQUESTS = 400  # different ones; each may come many times


def save(path: Path) -> Any:
    """A tiny model whose words are its tokens, w0 to w49, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from structattn.integrations.transformers import structurize

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,  # so that the largest logit is largest by far
        eos_token_id=None,
    )
    model = structurize(LlamaForCausalLM(config).eval(), "mlr:4|2|2@256|32|16,values=4|2|2")
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=["input_ids", "attention_mask"])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(path)
    return model


def text(tokens: Sequence[int]) -> str:
    """The words of tokens."""
    return " ".join(f"w{token}" for token in tokens)


def expected(model: Any, draw: random.Random) -> list[tuple[str, str, int]]:
    """(prompt, answer, new tokens) of the requests; prompts of one length are generated together."""
    wanted: list[tuple[str, str, int]] = []
    beginning = torch.tensor([draw.randrange(VOCABULARY) for _ in range(LONGEST)])
    while len(wanted) < REQUESTS:
        length, count = draw.randint(1, LONGEST), draw.randint(1, MOST_NEW)
        prompts = torch.tensor([[draw.randrange(VOCABULARY) for _ in range(length)] for _ in range(10)])
        for prompt in prompts[::2]:
            same = draw.randint(0, length)
            prompt[:same] = beginning[:same]
        outs = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=count)
        for prompt, out in zip(prompts.tolist(), outs[:, length:].tolist(), strict=True):
            wanted.append((text(prompt), text(out), count))
    return wanted


def resident_bytes() -> int:
    """Memory of this process, on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Storm:
    """What the clients found."""

    def __init__(self, wanted: list[tuple[str, str, int]], base: str, model: str, until: float) -> None:
        self.wanted, self.base, self.model, self.until = wanted, base, model, until
        self.right = self.wrong = self.left = self.failed = 0
        self.memory: list[tuple[float, int]] = []

    async def client(self, number: int, client: Any) -> None:
        """One request after the other."""
        draw = random.Random(number)
        while time.monotonic() < self.until:
            prompt, answer, count = draw.choice(self.wanted)
            leaves = draw.randint(1, count) if draw.random() < 0.25 else None
            try:
                found, has_left = await self.ask(client, prompt, count, leaves)
            except Exception as error:  # counted, and the storm goes on
                self.failed += 1
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                continue
            is_right = answer.startswith(found.rstrip()) if has_left else found.rstrip() == answer
            self.left += has_left
            self.right += is_right
            self.wrong += not is_right

    async def ask(self, client: Any, prompt: str, count: int, leaves: int | None) -> tuple[str, bool]:
        """The streamed text, and whether the client left before its end."""
        stream = await client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=count,
            temperature=0,
            stream=True,
        )
        pieces: list[str] = []
        async for chunk in stream:
            pieces.append(chunk.choices[0].delta.content or "" if chunk.choices else "")
            if len(pieces) == leaves:
                await stream.close()
                return "".join(pieces), True
        return "".join(pieces), False

    async def watch(self, start: float) -> None:
        """Notes the memory every few seconds."""
        while time.monotonic() < self.until:
            self.memory.append((time.monotonic() - start, resident_bytes()))
            await asyncio.sleep(2)

    async def run(self) -> None:
        """All clients, until the time is over and their last requests have ended."""
        import openai

        start = time.monotonic()
        async with openai.AsyncOpenAI(base_url=f"{self.base}/v1", api_key="none", timeout=600, max_retries=5) as client:
            await asyncio.gather(self.watch(start), *(self.client(number, client) for number in range(AT_ONCE)))


class Counts:
    """Tokens of prompts that requests shared, and tokens that the model computed."""

    def __init__(self) -> None:
        self.shared = self.computed = 0
        begin, step = PagePool.begin, PagedCache.step

        def counted_begin(pool: PagePool, request: str, tokens: Sequence[int]) -> int:
            found = begin(pool, request, tokens)
            self.shared += found
            return found

        def counted_step(cache: PagedCache, requests: Sequence[Tokens]) -> AbstractContextManager[None]:
            self.computed += sum(one.count for one in requests)
            return step(cache, requests)

        PagePool.begin, PagedCache.step = counted_begin, counted_step  # type: ignore[method-assign]


def started(port: int) -> None:
    """Starts the server in a thread, and waits until it answers."""
    from structattn import serve

    options = [
        "--continuous-batching",
        "--cb-num-blocks=40",
        "--cb-max-batch-tokens=512",
        "--device=cpu",
        "--log-level=error",
    ]
    threading.Thread(target=serve.main, args=([*options, f"--port={port}"],), daemon=True).start()
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was found; 0 if all is right."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.storm", description="A storm of requests on the server."
    )
    parser.add_argument("--minutes", type=float, default=10, help="how long requests come (10)")
    parser.add_argument(
        "--growth", type=float, default=0.1, help="memory that may be added after a tenth of the time, as a share (0.1)"
    )
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        counts = Counts()
        wanted = expected(save(Path(folder)), random.Random(0))
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        started(port)
        storm = Storm(wanted, f"http://localhost:{port}", folder, time.monotonic() + 60 * given.minutes)
        asyncio.run(storm.run())
    pools = [found for found in gc.get_objects() if type(found) is PagePool]
    deadline = time.monotonic() + 60
    while any(pool.num_used for pool in pools) and time.monotonic() < deadline:
        time.sleep(0.1)
    leaked = sum(pool.num_used for pool in pools)
    early = next(nbytes for at, nbytes in storm.memory if at >= 6 * given.minutes)
    growth = storm.memory[-1][1] / early - 1
    sys.stdout.write(
        f"{storm.right} right, {storm.wrong} wrong, {storm.failed} failed, {storm.left} left by the client\n"
        f"{counts.computed} tokens computed, {counts.shared} tokens of prompts shared\n"
        f"{leaked} of {sum(pool.num_pages for pool in pools)} pages leaked, in {len(pools)} pool\n"
        f"memory {early / 2**20:.0f} MiB after a tenth of the time, {storm.memory[-1][1] / 2**20:.0f} at the end: "
        f"{growth:+.1%}\n"
    )
    return int(
        bool(storm.wrong or storm.failed or leaked or not storm.right or len(pools) != 1 or growth > given.growth)
    )


if __name__ == "__main__":
    sys.exit(main())
