"""A saved structurized model behind transformers' own server."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from structattn import Storage, serve
from structattn.errors import MissingDependencyError
from structattn.extras import install_command
from structattn.integrations.transformers import Allocation, structurize
from structattn.spec import parse_spec

VOCAB = 50
NEEDS = [name for name in serve._LIBRARIES if find_spec(name) is None]


def chosen():
    """What a cache keeps that chooses tokens."""
    some = Storage(16, 16, group_size=4, residual=4, keep=4, block=16, recent=12)
    scorers = [torch.randn(2, 33), torch.randn(2, 33)]
    return Allocation(
        [parse_spec("standard")] * 2,
        storage=[some, [some, None]],
        nbytes=1,
        plain_nbytes=2,
        context_length=64,
        expected_loss=0.1,
        scorers=scorers,
    )


def save(path, structure):
    """A tiny model whose words are its tokens, w0 to w49: equal texts are equal tokens."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,  # so that the largest logit is largest by far
        eos_token_id=None,
    )
    model = structurize(transformers.LlamaForCausalLM(config).eval(), structure)
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, model_input_names=["input_ids", "attention_mask"]
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(path)
    return model


def text(tokens):
    return " ".join(f"w{token}" for token in tokens)


def test_what_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setattr(serve, "_LIBRARIES", ("json", "no_such_library"))
    with pytest.raises(
        SystemExit, match=re.escape(f"transformers, which needs no_such_library: {install_command('serve')}")
    ):
        serve.main(["model"])
    monkeypatch.setattr(serve, "_LIBRARIES", ())
    monkeypatch.delattr("transformers.cli.serve.Serve")
    with pytest.raises(MissingDependencyError, match=r"5.17 to 5.24 have, and transformers .* has not"):
        serve.server()


@pytest.mark.full
@pytest.mark.parametrize("structure", [pytest.param("mlr:4|2|2", id="levels"), pytest.param(chosen(), id="chosen")])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="one by one"),
        pytest.param(["--continuous-batching", "--cb-num-blocks=20", "--cb-max-batch-tokens=64"], id="together"),
    ],
)
@pytest.mark.skipif(bool(NEEDS), reason=f"transformers' server needs {', '.join(NEEDS)}: {install_command('serve')}")
def test_an_openai_client_gets_the_tokens_of_generate(tmp_path, options, structure) -> None:
    import openai

    model = save(tmp_path / "model", structure)
    prompts = [torch.randint(VOCAB, (length,)).tolist() for length in (3, 17, 40)]
    expected = [
        text(model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0, len(prompt) :].tolist())
        for prompt in prompts
    ]
    assert len({*expected}) == 3
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    base = f"http://localhost:{port}"
    command = [sys.executable, "-m", "structattn.serve", str(tmp_path / "model"), f"--port={port}", "--device=cpu"]
    command += options
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            deadline = time.monotonic() + 120
            while True:
                try:
                    with urllib.request.urlopen(f"{base}/health", timeout=5) as answer:
                        assert json.load(answer) == {"status": "ok"}
                    break
                except OSError:
                    assert server.poll() is None, (tmp_path / "log").read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.2)

            async def ask(client, prompt, count, chunks):
                """The streamed text; the request is cancelled after so many chunks."""
                stream = await client.chat.completions.create(
                    model=str(tmp_path / "model"),
                    messages=[{"role": "user", "content": text(prompt)}],
                    max_tokens=count,
                    temperature=0,
                    stream=True,
                )
                pieces = []
                async for chunk in stream:
                    pieces.append(chunk.choices[0].delta.content or "" if chunk.choices else "")
                    if len(pieces) == chunks:
                        await stream.close()
                        break
                return "".join(pieces)

            async def ask_all():
                async with openai.AsyncOpenAI(
                    base_url=f"{base}/v1", api_key="none", timeout=60, max_retries=0
                ) as client:
                    # This one would take hours if it were not cancelled, and the others wait behind it.
                    cancelled = asyncio.create_task(ask(client, prompts[0], 1_000_000, 5))
                    await asyncio.sleep(0.2)
                    answers = await asyncio.gather(*(ask(client, prompt, 24, None) for prompt in prompts))
                    return await cancelled, answers

            cancelled, answers = asyncio.run(ask_all())
            assert answers == expected
            assert cancelled
            assert expected[0].startswith(cancelled.rstrip())
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)
    assert server.returncode in (0, -signal.SIGTERM)  # uvicorn ends in order and then passes the signal on
    written = (tmp_path / "log").read_text()
    assert "Finished server process" in written
    assert "Traceback" not in written
