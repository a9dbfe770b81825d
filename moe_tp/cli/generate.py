"""`moe-tp generate PATH --prompt TEXT [layout]`: what the model writes after a prompt."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from moe_tp.checkpoint.scan import CONFIG, model_of_run
from moe_tp.checkpoint.states import is_state
from moe_tp.cli.options import (
    add_json_argument,
    add_layout_arguments,
    is_first_rank,
    make_mesh,
    parse_dtype,
    say,
    write_json,
)
from moe_tp.errors import ConfigError, DataError
from moe_tp.infer import Sample, sample_text
from moe_tp.infer.text import without_end
from moe_tp.models import from_pretrained
from moe_tp.train.chat import ChatTemplate
from moe_tp.train.tokenizer import Tokenizer, load_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", help="a hub-format folder")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="may be repeated"
    )
    parser.add_argument("--prompt-file", metavar="FILE", help="a text file: one prompt")
    parser.add_argument(
        "--chat", action="store_true", help="each prompt is a user's turn of the chat template"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 takes the likeliest token (default; 1 where --top-k or --top-p is given)",
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw among K tokens")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw among the likeliest P"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--dtype", help="of the weights (default: as they are on disk)")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="folder of the tokenizer (default: PATH)"
    )
    add_json_argument(parser)
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, having written what the model says.

    Collectives: those of `from_pretrained` and `sample_text`.
    """
    check_kind(Path(options.path))
    prompts = read_prompts(options)
    tokenizer = load_tokenizer(tokenizer_folder(options))
    ids = [prompt_ids(tokenizer, prompt, chat=options.chat) for prompt in prompts]
    dtype = None if options.dtype is None else parse_dtype(options.dtype)
    mesh = make_mesh(options)
    if mesh.size("cp") > 1:
        raise ConfigError("generate does not run with cp above 1; leave --cp out")
    drawn = options.top_k > 0 or options.top_p < 1.0
    temperature = options.temperature
    if temperature is None:
        temperature = 1.0 if drawn else 0.0
    elif temperature == 0.0 and drawn:
        raise ConfigError(
            "--temperature 0 takes the likeliest token, so --top-k and --top-p do nothing; leave "
            "them out, or raise the temperature"
        )
    model = from_pretrained(options.path, mesh, dtype=dtype)
    live = len(prompts) == 1 and is_first_rank() and options.json != "-"
    stream = Stream(tokenizer) if live else None
    start = time.perf_counter()
    samples = sample_text(
        model,
        tokenizer,
        prompts,
        prompt_ids=ids,
        max_new_tokens=options.max_new_tokens,
        temperature=temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        on_token=None if stream is None else stream.take,
    )
    seconds = time.perf_counter() - start
    if stream is not None:
        stream.end()
    elif len(samples) > 1:
        for sample in samples:
            say(options, f"> {sample.prompt}\n{sample.text}\n")
    write_json(options, result_of(samples, str(mesh.layout), seconds))
    return 0


def check_kind(folder: Path) -> None:
    """Refuse the folders of a run that hold no model.

    Raises:
        ConfigError: the folder is a training checkpoint, an adapter, or a run's output.
    """
    if is_state(folder):
        raise ConfigError(
            f"{folder} is a training checkpoint; write it as a model folder first: moe-tp "
            f"export {folder} OUT"
        )
    if (folder / "adapter_config.json").is_file() and not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{folder} is an adapter and no model; give the model with the adapter merged in, as "
            f"a run's final/ is"
        )
    final = model_of_run(folder)
    if final is not None:
        raise ConfigError(f"{folder} is the output of a run; its model is {final}: give that")


def read_prompts(options: argparse.Namespace) -> list[str]:
    """Return the prompts that the command line gives.

    Raises:
        DataError: there is none, or the file cannot be read.
    """
    prompts = list(options.prompt)
    if options.prompt_file is not None:
        try:
            prompts.append(Path(options.prompt_file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--prompt-file {options.prompt_file}: {error}") from error
    for number, prompt in enumerate(prompts):
        try:
            prompt.encode("utf-8")  # bytes of the command line that are no UTF-8 come as surrogates
        except UnicodeEncodeError as error:
            raise DataError(
                f"prompt {number} is not UTF-8 text: character {error.start} cannot be read"
            ) from error
    if not prompts:
        raise DataError("there is no prompt; give --prompt TEXT or --prompt-file FILE")
    return prompts


def tokenizer_folder(options: argparse.Namespace) -> Path:
    """Return the folder of the tokenizer.

    Raises:
        DataError: the model does not lie in a folder, and none is named.
    """
    folder = Path(options.tokenizer or options.path)
    if not folder.is_dir():
        raise DataError(
            f"{folder} is no folder of this machine, so its tokenizer cannot be read; check the "
            f"path, or, for a model that lies elsewhere, name a folder that has it with --tokenizer"
        )
    return folder


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, chat: bool) -> list[int]:
    """Return the ids of a prompt, as a text or as a user's turn.

    Raises:
        DataError: the model has no chat template.
    """
    if not chat:
        return without_end(tokenizer, prompt)
    if tokenizer.chat_template is None:
        raise DataError("the model's folder has no chat template; leave --chat out")
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special)
    text = template.prompt([{"role": "user", "content": prompt}])
    return tokenizer.backend.encode(text).ids


class Stream:
    """Text on stdout as its tokens come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.shown = tokenizer, ""
        self.ids: list[int] = []

    def take(self, row: int, token: int) -> None:
        """Show what one more token adds; an unfinished character waits for its rest."""
        self.ids.append(token)
        text = self.tokenizer.backend.decode(self.ids)
        if not text.endswith("\ufffd"):
            self._show(text)

    def end(self) -> None:
        """Show the rest, and end the line."""
        self._show(self.tokenizer.backend.decode(self.ids))
        print(flush=True)

    def _show(self, text: str) -> None:
        if text.startswith(self.shown):
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text


def result_of(samples: list[Sample], layout: str, seconds: float) -> dict[str, object]:
    """Return the result for machines."""
    count = sum(len(sample.tokens) for sample in samples)
    return {
        "layout": layout,
        "seconds": seconds,
        "tokens_per_second": count / seconds if seconds > 0 else 0.0,
        "samples": [
            {
                "prompt": sample.prompt,
                "text": sample.text,
                "tokens": sample.tokens,
                "reason": sample.reason,
            }
            for sample in samples
        ],
    }
