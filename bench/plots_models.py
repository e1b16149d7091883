"""Pictures of whole models, of their decode steps, and of serving."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.pictures import Row, new_figure, rows, save


def draw_serving(folder: Path) -> None:
    """Llama 3.1 70B, 64 query heads and 8 KV heads of 128 in 80 layers; NVFP4 weights leave 100 GB of an H200."""
    layers, memory, context = 80, 100e9, 8192
    shape = {"heads": "64", "kv_heads": "8", "kv_layout": "HND", "page": "64", "context": f"{context}"}
    measured = [row for row in rows(folder, "attention") if (shape | {"cache": "nvfp4"}).items() <= row.items()]
    formats = {"NVFP4, jitfp4": ("us", 0.5625), "FP8, best kernel": ("fp8_us", 1), "bf16, best kernel": ("bf16_us", 2)}
    figure = new_figure(11, 4)
    left, right = figure.subplots(1, 2)
    for name, (field, size) in formats.items():
        fit = memory / (2 * layers * 8 * 128 * size)  # tokens
        points = [(int(row["batch"]), float(row[field])) for row in measured if int(row["batch"]) * context <= fit]
        rates = [batch / (layers * us * 1e-6) for batch, us in points]
        left.plot([batch for batch, _ in points], rates, marker=".", label=name)
        tokens = [1024 << n for n in range(8)]
        right.plot(tokens, [fit / n for n in tokens], marker=".", label=name.split(",")[0])
    left.set(xlabel=f"requests of {context} tokens", ylabel="tokens per second", title="decode, if attention were all")
    right.set(
        xlabel="tokens of a request", ylabel="requests", title="requests whose cache fits in 100 GB", yscale="log"
    )
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.grid(alpha=0.3)
        axis.legend()
    left.set_ylim(0)
    right.yaxis.set_major_formatter("{x:.0f}")
    figure.suptitle("Llama 3.1 70B: 64 heads, 8 KV heads of 128, 80 layers")
    save(figure, folder, "serving", "attention")


def draw_step(folder: Path) -> None:
    """A token of 8B by parts, and steps of both models beside the time of their bytes: before and after."""
    before, after = rows(folder, "step_before"), steps(folder)
    figure = new_figure(13, 5)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    first = [row | {"products_and_head_us": row["products_us"] + row["head_us"],
                    "attention_and_append_us": row["attention_us"] + row["append_us"]}
             for kind in ("fused", "persistent") for row in [after["8b", 1, 2048, kind]]]  # fmt: skip
    bars = ({column: float(value) for column, value in before[0].items() if column.endswith("_us")}, *first)
    names = ("before", "a chain of launches", "DecodeStep")
    bottom = [0.0] * len(bars)
    for part, colour in STEP_PARTS.items():
        heights = [bar.get(f"{part}_us", 0.0) for bar in bars]
        left.bar(names, heights, 0.6, bottom, color=colour, label=part.replace("_", " "))
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for number, us in enumerate((1e3 * float(before[0]["ms"]), *(1e3 * row["ms"] for row in first))):
        left.plot([number - 0.35, number + 0.35], [us, us], color="black", label="the step" if number == 0 else None)
    left.axhline(1e3 * first[0]["bound_ms"], color="0.5", ls="--", label="its bytes at read bandwidth")
    left.set(title="A token of Llama 3.1 8B, one request of 2,048 tokens", ylabel="us", ylim=(0, 2800))
    left.legend(fontsize="small", loc="upper right", ncols=2)
    labels = [f"{row['model']}\n{row['batch']} x {int(row['context']) // 1024}k" for row in before]
    now = [best_step(after, row) for row in before]
    shown = {
        "bf16, before": ("0.7", [float(row["bf16_ms"]) for row in before]),
        "NVFP4 weights and cache, before": ("tab:orange", [float(row["ms"]) for row in before]),
        "now": ("tab:green", [row["ms"] for row in now]),
        "its bytes at read bandwidth": ("0.3", [row["bound_ms"] for row in now]),
    }
    for number, (name, (colour, times)) in enumerate(shown.items()):
        drawn = right.bar([i + 0.2 * number for i in range(len(labels))], times, 0.18, color=colour, label=name)
        right.bar_label(drawn, [f"{time:.3g}" for time in times], fontsize="x-small", rotation=90, padding=3)
    right.set_xticks([i + 0.3 for i in range(len(labels))], labels)
    right.set(title="Whole steps (70b/4: a quarter of its layers)", ylabel="ms", ylim=(0, 23))
    right.legend(fontsize="small")
    save(figure, folder, "step", "step")


STEP_PARTS = {
    "products_and_head": "tab:blue",
    "attention_and_append": "tab:green",
    "layers": "tab:cyan",
    "glue": "tab:orange",
    "seams": "0.6",
}


def steps(folder: Path) -> dict[tuple[str, int, int, str], dict[str, float]]:
    """The measured columns of steps, by model, requests, context and kind; seams that overlap are none."""
    found = {}
    for row in rows(folder, "step"):
        key = row["model"], int(row["batch"]), int(row["context"]), row["step"]
        measured = {name: float(value) for name, value in row.items() if name.endswith(("us", "ms", "roof"))}
        found[key] = measured | {"seams_us": max(0.0, measured["seams_us"])}
    return found


def best_step(after: Mapping[tuple[str, int, int, str], dict[str, float]], row: Row) -> dict[str, float]:
    """The fastest step of a model, its requests and context."""
    cell = row["model"], int(row["batch"]), int(row["context"])
    return min((step for key, step in after.items() if key[:3] == cell), key=lambda step: step["ms"])


def draw_models(folder: Path) -> None:
    """Whole models: how often the tokens per second of bf16, and tokens per second above the bars."""
    of_vllm = [*rows(folder, "vllm"), *rows(folder, "vllm_experts")]
    of_torch = [row for row in rows(folder, "models") if row["context"] == "2048"]
    panels = (
        ("vLLM, Llama 3.1 8B", [row for row in of_vllm if row["model"] == "llama-3.1-8b"]),
        ("vLLM, Qwen3 30B A3B", [row for row in of_vllm if row["model"] == "qwen3-30b-a3b"]),
        ("transformers, Llama 3.1 8B", [row for row in of_torch if row["model"] == "llama-3.1-8b"]),
        ("transformers, Qwen3 30B A3B", [row for row in of_torch if row["model"] == "qwen3-30b-a3b"]),
    )
    bars = {
        "16-bit floats (bf16)": ("0.7", ("bf16",)),
        "FP4 weights by the engine's own kernels": ("tab:orange", ("own",)),
        "FP4 weights by jitfp4": ("tab:green", ("plugin",)),
        "FP4 weights and FP4 cache by jitfp4": ("darkgreen", ("plugin-kv", "w4-kv4")),
    }
    figure = new_figure(18, 5)
    axes = figure.subplots(1, 4, sharey=True)
    for axis, (title, measured) in zip(axes, panels, strict=True):
        rate = {(row["variant"], row["batch"]): float(row["tokens_per_s"]) for row in measured}
        batches = [batch for variant, batch in rate if variant == "bf16"]
        for number, (name, (colour, variants)) in enumerate(bars.items()):
            found = [next((rate[v, batch] for v in variants if (v, batch) in rate), None) for batch in batches]
            at = [(i + 0.2 * number, batch, value) for i, (batch, value) in enumerate(zip(batches, found, strict=True))
                  if value is not None]  # fmt: skip
            heights = [value / rate["bf16", batch] for _, batch, value in at]
            drawn = axis.bar([x for x, _, _ in at], heights, 0.18, color=colour, label=name)
            axis.bar_label(drawn, [f"{value:,.0f}" for _, _, value in at], fontsize="x-small", rotation=90, padding=3)
        axis.set_xticks([i + 0.3 for i in range(len(batches))], batches)
        axis.set(title=title, xlabel="requests at a time")
        axis.axhline(1, color="0.5", lw=1)
    axes[0].set(ylabel="times as fast as bf16", ylim=(0, 1.3 * axes[0].get_ylim()[1]))
    axes[0].legend(fontsize="small", loc="upper left")
    figure.suptitle("Speed of whole models in times of 16-bit floats; above each bar its tokens per second")
    save(figure, folder, "models", "vllm", "vllm_experts", "models")


CONTEXT_MODELS = {
    "llama-3.1-8b": "Llama 3.1 8B",
    "llama-3.1-70b": "Llama 3.1 70B",
    "qwen3-30b-a3b": "Qwen3 30B A3B",
    "gpt-oss-120b": "gpt-oss 120B",
    "qwen3-next-80b-a3b": "Qwen3 Next 80B A3B",
}
CONTEXT_BARS = (
    ("bf16", "bf16, where it fits and ran", "0.7"),
    ("w4-kv4", "FP4 weights and FP4 cache", "tab:green"),
)


def draw_contexts(folder: Path) -> None:
    """Steps of whole models by requests and context: in bf16 where it fits, in FP4, and the time of their bytes."""
    files = [path.stem for path in sorted(folder.glob("models*.csv")) if not path.stem.endswith("_prefill")]
    measured: dict[str, dict[tuple[str, int, int], Row]] = {}
    for row in (row for file in files for row in rows(folder, file)):
        measured.setdefault(row["model"], {})[row["variant"], int(row["batch"]), int(row["context"])] = row
    order = sorted({(batch, context) for found in measured.values() for _, batch, context in found})
    shown = {model: title for model, title in CONTEXT_MODELS.items() if model in measured}
    figure = new_figure(18, 5)
    for axis, (model, title) in zip(figure.subplots(1, len(shown), sharey=True), shown.items(), strict=True):
        for shift, (variant, name, colour) in enumerate(CONTEXT_BARS):
            own = [(i + 0.4 * shift - 0.2, measured[model].get((variant, *cell))) for i, cell in enumerate(order)]
            there = [(x, row) for x, row in own if row is not None]
            drawn = axis.bar(
                [x for x, _ in there], [float(row["ms"]) for _, row in there], 0.38, color=colour, label=name
            )
            labels = [f"{float(row['tokens_per_s']):,.0f}" for _, row in there]
            axis.bar_label(drawn, labels, fontsize="xx-small", rotation=90, padding=3)
            for x, row in there:
                axis.plot([x - 0.19, x + 0.19], [float(row["bound_ms"])] * 2, color="black", lw=1)
        axis.set_xticks(range(len(order)), [f"{batch} x {context // 1024}k" for batch, context in order], rotation=90)
        axis.set(title=title, yscale="log")
    first = figure.axes[0]
    first.set(ylabel="ms of a step", ylim=(first.get_ylim()[0], 3 * first.get_ylim()[1]))
    first.yaxis.set_major_formatter("{x:g}")
    first.legend(fontsize="small", loc="upper left")
    figure.suptitle(
        "One token of each request, whole models on one H200, requests x tokens of each. "
        "Above: tokens per second. Black: the time to read the step's bytes"
    )
    save(figure, folder, "contexts", *files)
