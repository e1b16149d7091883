"""Decode steps of whole models in SGLang: in bf16, with SGLang's own FP4 kernels, and with jitfp4's plugin.

    python -m bench.engines.sglang_decode [--model llama-3.1-8b] [--variant bf16 own plugin] [--layers 32]
        [--batch 1 8 64] [--context 16] [--attention fa3] [--check small-llama] [--limit 60] [--out DIR]

A step is the difference between generating 160 tokens and 32, divided by 128: prompts do not count. ``ms_first`` is the
time of a first token of all requests. Weights are random, and the same for each variant of FP4. Each run is a fork with
an offline engine of its own, which starts SGLang's scheduler in another process. All start at once, for that is the
longest part, and then one works after the other while the rest wait: the GPU must hold all of them. ``sglang.csv`` has
a line for a model, a variant, an attention backend and a batch; ``loaded_after_ready`` counts kernels of jitfp4 that
the scheduler loaded while it served. Lines are written after each variant.

``--check`` writes small random checkpoints of each architecture in NVFP4, and their weights in
bf16, which holds every value of NVFP4, and compares logits: an engine generates tokens, and SGLang without jitfp4 reads
the same tokens as a prompt of the bf16 checkpoint.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.engines.check_sglang import CHECKED, checked, compared, write_checkpoints
from bench.engines.forks import begun, finished, use_recorded_gpu, wait_for
from bench.engines.models import MODELS, Variant, config_of, seed
from bench.harness import write_results
from bench.stamp import ROOT, stamp

FEW, MANY, ROUNDS = 32, 160, 3
CAPTURED = [1, 8, 64]
VARIANTS = {"bf16": "", "own": "", "plugin": "jitfp4"}
FORMS = {"modelopt": "plugin", "compressed-tensors": "plugin", "bf16": "bf16"}  # bf16 reads what the others said
EARLY = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.models.llama",
    "jitfp4.integrations.sglang",
)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "*.mlp.gate"]}
Rows = list[dict[str, object]]


def register_seed() -> None:
    """The plugin of the bench.

    It fills what SGLang loads as ``dummy`` with FP4 codes of a trained model's spread, and lets the scheduler write how
    many kernels of jitfp4 it has loaded.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_loader.loader.initialize_dummy_weights", seed, HookType.REPLACE)
    Scheduler.write_loaded = write_loaded


def write_loaded(scheduler: Any, file: str) -> None:
    """Write how many kernels of jitfp4 this process has loaded."""
    del scheduler
    from jitfp4 import engine

    Path(file).write_text(str(engine.loaded()))


class Run(NamedTuple):
    """An engine: its name, its variant, what it does, and its files."""

    name: str
    variant: str
    work: Callable[[Callable[[], None]], None]  # gets what to call when it is ready, and returns at its turn
    folder: Path

    def wait(self) -> None:
        """Say that the engine is ready, and wait for its turn."""
        (self.folder / f"{self.name}.ready").touch()
        while not (self.folder / f"{self.name}.turn").exists():
            time.sleep(0.02)

    def start(self) -> None:
        """Work, with the plugins of the variant."""
        os.environ["SGLANG_PLUGINS"] = ",".join(filter(None, ("seeded", VARIANTS[self.variant])))
        self.work(self.wait)


def engine_of(folder: Path, attention: str, **changes: Any) -> tuple[Any, float]:
    """SGLang with the model of a folder, and the seconds until it was ready. Decode steps are CUDA graphs."""
    from sglang.srt.entrypoints.engine import Engine

    begun = time.perf_counter()
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "attention_backend": attention,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "cuda_graph_bs_decode": CAPTURED,
        "disable_prefill_cuda_graph": True,
        "max_running_requests": CAPTURED[-1],
        "mem_fraction_static": 0.8,
        "disable_radix_cache": True,
        "random_seed": 0,
        "log_level": "info",
    }
    return Engine(**arguments | changes), time.perf_counter() - begun


def prompt(request: int, tokens: int) -> list[int]:
    """A prompt that no other request begins with."""
    return [(7 * request + 13 * place) % 31000 + 10 for place in range(tokens)]


def measured(
    model: str, name: str, attention: str, options: argparse.Namespace, into: Path, ready: Callable[[], None]
) -> None:
    """Write lines of one variant of a model."""
    with tempfile.TemporaryDirectory() as made:
        config = config_of(model, Variant(quantized=False), options.layers)
        if name != "bf16":
            config["quantization_config"] = MODELOPT
        (Path(made) / "config.json").write_text(json.dumps(config))
        context = options.context + 512
        engine, seconds = engine_of(
            Path(made), attention, load_format="dummy", context_length=context, max_total_tokens=CAPTURED[-1] * context
        )
    ready()
    before = loaded(engine, into)

    def generate(batch: int, tokens: int) -> float:
        prompts = [prompt(request, options.context) for request in range(batch)]
        wanted = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        begun = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=wanted)
        return time.perf_counter() - begun

    rows: Rows = []
    for batch in options.batch:
        generate(batch, FEW)
        least = [min(generate(batch, tokens) for _ in range(ROUNDS)) for tokens in (FEW, MANY)]
        step, first = (least[1] - least[0]) / (MANY - FEW), min(generate(batch, 1) for _ in range(ROUNDS))
        row: dict[str, object] = {"model": model, "variant": name, "attention": attention}
        row |= {"layers": config["num_hidden_layers"], "batch": batch, "prompt": options.context}
        row |= {"ms_first": f"{first * 1e3:.2f}", "ms_per_step": f"{step * 1e3:.3f}"}
        row |= {"tokens_per_s": f"{batch / step:.0f}", "ready_s": f"{seconds:.1f}"}
        rows.append(row | {"loaded_after_ready": loaded(engine, into) - before})
        print("RESULT", rows[-1], flush=True)
        into.write_text(json.dumps(rows))
    engine.shutdown()


def loaded(engine: Any, into: Path) -> int:
    """Kernels of jitfp4 that an engine's scheduler has loaded."""
    file = into.with_suffix(".loaded")
    engine.collective_rpc("write_loaded", file=str(file))
    return int(file.read_text())


def set_environment(made: Path) -> None:
    """What SGLang reads: offline, and a folder that makes an installed distribution with the plugin ``seeded``."""
    folder = made / "seeded-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: seeded\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nseeded = bench.engines.sglang_decode:register_seed\n"
    )
    sys.path.append(str(made))
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT), str(made)))),
    }


def run(runs: list[Run], logs: Path, limit: float, done: Callable[[Run], None]) -> list[str]:
    """Start engines at once, and let them work one after the other. Returns the names of those that failed."""
    files = [logs / f"{one.name}.log" for one in runs]
    children = [begun(one.start, log) for one, log in zip(runs, files, strict=True)]
    since = time.monotonic()
    for one, child in zip(runs, children, strict=True):
        wait_for(one.folder / f"{one.name}.ready", child, limit - (time.monotonic() - since))
    print(f"ready in {time.monotonic() - since:.0f} s", flush=True)
    failed = []
    for one, child, log in zip(runs, children, files, strict=True):
        (one.folder / f"{one.name}.turn").touch()
        if finished(child, log, limit):
            failed.append(one.name)
        else:
            done(one)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=MODELS, default=["llama-3.1-8b"])
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--attention", nargs="+", default=["fa3"], help="SGLang's attention backends")
    parser.add_argument("--check", nargs="*", choices=CHECKED, default=[], help="compare logits of small models first")
    parser.add_argument("--form", nargs="+", choices=FORMS, default=list(FORMS), help="of their checkpoints")
    parser.add_argument("--limit", type=float, default=60, help="seconds to start, and of a variant")
    parser.add_argument("--logs", type=Path, help="a folder for the output of each run")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    options = parser.parse_args()
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        logs = options.logs or made
        logs.mkdir(parents=True, exist_ok=True)
        set_environment(made)
        torch.set_num_threads(1)  # forks do not have the others, and would wait for them
        use_recorded_gpu()
        since = time.monotonic()
        for module in EARLY:
            importlib.import_module(module)
        print(f"imported in {time.monotonic() - since:.0f} s", flush=True)
        runs = []
        for model, form in product(options.check, options.form):
            if form == options.form[0]:
                write_checkpoints(model, made / model)
            check = partial(checked, model, FORMS[form], made / model / form, engine_of, options.attention[0])
            runs.append(Run(f"{model}_{form}", FORMS[form], check, made))
        for model, attention, name in product(options.model, options.attention, options.variant):
            run_name = f"{model}_{name}_{attention}"
            measure = partial(measured, model, name, attention, options, made / f"{run_name}.json")
            runs.append(Run(run_name, name, measure, made))
        origin = stamp() | {"sglang": version("sglang"), "sglang-kernel": version("sglang-kernel")}

        def done(ended: Run) -> None:
            written = made / f"{ended.name}.json"
            if written.exists():
                rows.extend(json.loads(written.read_text()))
                write_results(options.out / "sglang", rows, origin)
            elif ended.variant == "bf16":
                compared(ended.name.partition("_")[0], made / ended.name.partition("_")[0])

        failed = run(runs, logs, options.limit, done)
    if failed:
        raise SystemExit(f"failed: {failed}")


if __name__ == "__main__":
    from bench.engines import sglang_decode  # the module that SGLang's processes and plugins see

    sglang_decode.main()
