"""Draws the pictures of the committed results from their CSV files; needs no GPU.

python -m bench.plots [--out bench/results/h200]
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

Row = dict[str, str]


def rows(folder: Path, name: str) -> list[Row]:
    with (folder / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def origin(folder: Path, names: Sequence[str]) -> str:
    """The GPU on which results were measured, and of each file the commit and the day."""
    stamps = {name: json.loads((folder / f"{name}.json").read_text())["stamp"] for name in names}
    gpus = sorted({stamp["gpu"].split(",")[0] for stamp in stamps.values()})
    return ", ".join(
        [*gpus, *(f"{name} {stamp['commit'][:7]} ({stamp['date'][:10]})" for name, stamp in stamps.items())]
    )


def save(figure: Any, folder: Path, picture: str, *names: str) -> None:
    """Writes the picture, which says of which results it is."""
    figure.supxlabel(origin(folder, names or (picture,)), x=0.99, ha="right", fontsize="x-small", color="0.4")
    path = folder / f"{picture}.png"
    figure.savefig(path, dpi=110, metadata={"Software": None})  # the same picture from the same figures
    print(path)


def new_figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def cells(
    axis: Any,
    values: Mapping[tuple[str, str], float],
    *,
    title: str,
    labels: tuple[str, str],
    colours: tuple[float, float],
    names: Mapping[str, str] | None = None,
) -> None:
    """A table of figures with (y, x) as keys, coloured from red, the worst, to green, the best. Other cells were not
    measured.
    """
    from matplotlib import colormaps

    down, across = list(dict.fromkeys(y for y, _ in values)), list(dict.fromkeys(x for _, x in values))
    table = [[values.get((y, x), float("nan")) for x in across] for y in down]
    colour_of = colormaps["RdYlGn"].with_extremes(bad="0.9")
    axis.imshow(table, cmap=colour_of, vmin=colours[0], vmax=colours[1], aspect="auto")
    axis.set_xticks(range(len(across)), across)
    axis.set_yticks(range(len(down)), [(names or {}).get(y, y) for y in down])
    axis.set(xlabel=labels[1], ylabel=labels[0])
    axis.set_title(title, fontsize="medium")
    for i, j in product(range(len(down)), range(len(across))):
        measured = table[i][j] == table[i][j]
        red, green, blue, _ = colour_of((table[i][j] - colours[0]) / (colours[1] - colours[0]))
        dark = measured and 0.3 * red + 0.6 * green + 0.1 * blue < 0.45
        text = f"{table[i][j]:.2f}" if measured else "not\nmeasured"
        axis.text(j, i, text, ha="center", va="center", fontsize="small" if measured else "xx-small",
                  color="white" if dark else "black")  # fmt: skip


def draw_quantize(folder: Path) -> None:
    grid = rows(folder, "quantize_grid")
    figure = new_figure(13, 6.5)
    panels = (("ratio", "time of a copy of the same bytes / ours", (0.7, 1.1)), ("tb_per_s", "TB/s", (0, 4.5)))
    for axis, (field, title, colours) in zip(figure.subplots(1, 2), panels, strict=True):
        values = {(row["m"], row["k"]): float(row[field]) for row in grid}
        cells(axis, values, title=title, labels=("m", "k"), colours=colours)
    figure.suptitle("nvfp4_quantize, bf16 [m, k], scales in 128x4")
    save(figure, folder, "quantize_grid")


def draw_norm(folder: Path) -> None:
    measured = rows(folder, "norm")
    figure = new_figure(11, 7)
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    fields = (("speedup", "speed-up over separate kernels"), ("tb_per_s", "TB/s"))
    for column, op in enumerate(("rmsnorm", "add_rmsnorm")):
        for axis, (field, label) in zip(axes[:, column], fields, strict=True):
            lines(axis, [row for row in measured if row["op"] == op], by="hidden", x="rows", y=field)
            axis.set(xscale="log", xlabel="rows", ylabel=label, title=f"{op}_fp4quant", ylim=(0, None))
    axes[0, 0].legend(fontsize="small", ncols=2)
    figure.suptitle("float16 in, NVFP4 out")
    save(figure, folder, "norm")


def lines(axis: Any, measured: Sequence[Row], *, by: str, x: str, y: str) -> None:
    for name in dict.fromkeys(row[by] for row in measured):
        line = [(float(row[x]), float(row[y])) for row in measured if row[by] == name]
        axis.plot(*zip(*line, strict=True), marker=".", label=f"{by} {name}")
    axis.grid(alpha=0.3)


def draw_gdn(folder: Path) -> None:
    measured = [row for row in rows(folder, "gdn") if (row["value_heads"], row["state"]) == ("32", "f32")]
    figure = new_figure(13, 5)
    kept = [row for row in measured if (row["update"], row["steps"]) == ("True", "True")]
    final = [row for row in measured if (row["update"], row["steps"]) == ("True", "False")]
    panels = (
        ("every token's state kept: FlashInfer / ours", kept, "speedup", (0.5, 1.5)),
        ("every token's state kept: copy / ours", kept, "of_copy", (0.6, 1.1)),
        ("only the final state kept: copy / ours", final, "of_copy", (0.6, 1.1)),
    )
    for axis, (title, chosen, field, colours) in zip(figure.subplots(1, 3), panels, strict=True):
        values = {(row["batch"], row["tokens"]): float(row[field]) for row in chosen if row[field]}
        cells(axis, values, title=title, labels=("batch", "tokens of a call"), colours=colours)
    figure.suptitle("gated_delta_rule_mtp, 32 value heads, float32 states, warm L2")
    save(figure, folder, "gdn")


def draw_attention(folder: Path) -> None:
    chosen = {"cache": "nvfp4", "heads": "64", "kv_heads": "8", "kv_layout": "HND", "page": "64"}
    measured = [row for row in rows(folder, "attention") if chosen.items() <= row.items()]
    figure = new_figure(13, 4)
    panels = (
        ("best bf16 kernel / ours", "over_bf16", (0, 2)),
        ("best FP8 kernel / ours", "over_fp8", (0, 2)),
        ("bytes of the cache: share of the read bandwidth", "of_read", (0, 1)),
    )
    for axis, (title, field, colours) in zip(figure.subplots(1, 3), panels, strict=True):
        values = {(row["batch"], row["context"]): float(row[field]) for row in measured if row[field]}
        cells(axis, values, title=title, labels=("batch", "tokens of a request"), colours=colours)
    figure.suptitle("decode attention, NVFP4 cache, 64 heads, 8 KV heads of 128, HND pages of 64")
    save(figure, folder, "attention")


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


def draw_gemm(folder: Path) -> None:
    measured = [*rows(folder, "gemm"), *rows(folder, "gemm_wide")]
    measured.sort(key=lambda row: (int(row["n"]) * int(row["k"]), int(row["n"]), int(row["m"])))
    figure = new_figure(14, 6)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    values = {(f"{row['n']} x {row['k']}", row["m"]): float(row["of_cublas"]) for row in measured}
    cells(left, values, title="cuBLAS bf16 / ours", labels=("n x k of the weight", "m"), colours=(0, 2))
    few = [row for row in measured if row.get("of_read") and int(row["m"]) <= 32]
    megabytes = [row | {"MB": f"{int(row['n']) * int(row['k']) * 0.5625e-6}"} for row in few]
    lines(right, megabytes, by="m", x="MB", y="of_read")
    right.set(xscale="log", xlabel="NVFP4 bytes of the weight, MB", ylabel="share of the read bandwidth", ylim=(0, 1))
    right.legend()
    figure.suptitle("mm_bf16_fp4, NVFP4 weights, cold")
    save(figure, folder, "gemm", "gemm", "gemm_wide")


def draw_gemm_tactics(folder: Path) -> None:
    """The roofline of two layers, and what the tables choose: rows of x that a CTA takes, and CTAs that share k."""
    from jitfp4.arch import Arch
    from jitfp4.families.gemm.operation import MM_BF16_FP4
    from jitfp4.families.gemm.problem import Problem
    from jitfp4.formats import NVFP4, DType

    few = rows(folder, "gemm")
    measured = [row for row in few if int(row["m"]) < 64] + rows(folder, "gemm_wide")
    figure = new_figure(16, 6)
    *roofs, right = figure.subplots(1, 3, width_ratios=(2, 2, 4))
    for axis, (n, k) in zip(roofs, (("8192", "8192"), ("4096", "4096")), strict=True):
        layer = [row for row in measured if (row["n"], row["k"]) == (n, k)]
        read_us = next(float(row["read_us"]) for row in few if (row["n"], row["k"], row["m"]) == (n, k, "1"))
        m = [int(row["m"]) for row in layer]
        work = 2e-6 * int(n) * int(k)  # of a row, in millions
        for field, name in (("us", "NVFP4 weights"), ("cublas_bf16_us", "cuBLAS bf16")):
            axis.plot(m, [work * int(row["m"]) / float(row[field]) for row in layer], marker=".", label=name)
        axis.plot(m, [min(work * rows_ / read_us, 989) for rows_ in m], "--", lw=1, label="weight read, or 989 TFLOP/s")
        axis.set(xscale="log", yscale="log", xlabel="m", ylabel="TFLOP/s", title=f"{n} x {k}, roof dashed")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    layers = sorted({(int(row["n"]), int(row["k"])) for row in measured}, key=lambda layer: layer[0] * layer[1])
    counts = sorted({int(row["m"]) for row in measured})
    problems = [[Problem(DType.BF16, DType.BF16, NVFP4, m, n, k) for m in counts] for n, k in layers]
    tactics = [[MM_BF16_FP4.select(problem, Arch.of("sm_90a")) for problem in line] for line in problems]
    right.imshow(
        [[tactic.tile_m.bit_length() for tactic in line] for line in tactics], cmap="Blues", vmax=12, aspect="auto"
    )
    for (i, line), (j, _) in product(enumerate(tactics), enumerate(counts)):
        right.text(j, i, f"{line[j].tile_m} / {line[j].split}", ha="center", va="center", fontsize="small")
    right.set_xticks(range(len(counts)), counts)
    right.set_yticks(range(len(layers)), [f"{n} x {k}" for n, k in layers])
    right.set(xlabel="m", title="rows of x that a CTA takes / CTAs that share k, by the tables")
    figure.suptitle("mm_bf16_fp4, NVFP4 weights, cold")
    save(figure, folder, "gemm_tactics", "gemm", "gemm_wide")


def draw_mm_fp4(folder: Path) -> None:
    measured = rows(folder, "mm_fp4")
    measured.sort(key=lambda row: (int(row["n"]) * int(row["k"]), int(row["n"]), int(row["m"])))
    figure = new_figure(11, 4)
    values = {(f"{row['n']} x {row['k']}", row["m"]): float(row["of_cublas"]) for row in measured}
    cells(figure.subplots(), values, title="cuBLAS bf16 / ours", labels=("n x k", "m"), colours=(0, 2))
    figure.suptitle("mm_fp4, both operands NVFP4 in 128x4, cold")
    save(figure, folder, "mm_fp4")


def draw_prefill(folder: Path) -> None:
    """Of each kind of cache those shapes for which a peer was measured."""
    chosen = {"heads": "64", "kv_heads": "8", "kv_layout": "HND", "page": "64", "head_dim": "128", "kernel": ""}
    measured = [row for row in rows(folder, "prefill") if chosen.items() <= row.items()]
    figure = new_figure(14, 4)
    panels = (("cuDNN bf16", "over_cudnn"), ("best bf16 kernel", "over_bf16"), ("best FP8 kernel", "over_fp8"))
    shapes = dict.fromkeys((row["batch"], row["context"], row["q_len"]) for row in measured if row["over_bf16"])
    for axis, (peer, field) in zip(figure.subplots(1, 3), panels, strict=True):
        values = {
            (row["cache"], f"{row['batch']} x {row['context']}\n{row['q_len']} new"): float(row[field] or "nan")
            for row in measured
            if (row["batch"], row["context"], row["q_len"]) in shapes
        }
        cells(axis, values, title=f"{peer} / ours", labels=("cache", "requests x tokens"), colours=(0, 2))
    figure.suptitle("prefill attention, 64 heads, 8 KV heads of 128, HND pages of 64")
    save(figure, folder, "prefill")


def draw_append(folder: Path) -> None:
    measured = [row for row in rows(folder, "kv") if (row["layout"], row["page"]) == ("NHD", "16")]
    measured = [row for row in measured if row["case"] in ("append by slot", "append by position")]
    figure = new_figure(11, 4)
    panels = (("ratio", "time of a copy of the same bytes / ours"), ("speedup", "FlashInfer / ours"))
    for axis, (field, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for case in dict.fromkeys(row["case"] for row in measured):
            found = sorted((int(r["tokens"]), float(r[field])) for r in measured if r["case"] == case and r[field])
            axis.plot(*zip(*found, strict=True), marker="o", label=case)
        axis.axhline(1, color="0.5", lw=1)
        axis.set(xscale="log", xlabel="tokens of a call", ylabel=label, ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle("append into an NVFP4 cache, 8 KV heads of 128, NHD pages of 16")
    save(figure, folder, "append", "kv")


def draw_launch(folder: Path) -> None:
    """Host time of repeated calls of public functions, beside the smallest operation of torch."""
    measured = [row for row in rows(folder, "launch") if row["call"] in HOST_CALLS]
    figure = new_figure(11, 5)
    axis = figure.subplots()
    times = [float(row["host_us"]) for row in measured]
    names = [row["call"].removeprefix("good: ") for row in measured]
    bars = axis.barh(names, times, color=["0.6" if name in REFERENCES else "tab:green" for name in names])
    axis.bar_label(bars, [f"{time:.1f} us" for time in times], padding=3)
    axis.invert_yaxis()
    axis.set(xlabel="us of the host for a call", xlim=(0, 1.15 * max(times)))
    figure.suptitle("Host time of a call (grey: torch and Triton)")
    save(figure, folder, "launch")


REFERENCES = ("torch in-place add", "Triton kernel, 7 arguments")
HOST_CALLS = (
    *("nvfp4_quantize, outputs given", "rmsnorm_fp4quant, outputs given", "mm_bf16_fp4", "mm_fp4"),
    *("append, a cache in one tensor", "trtllm_batch_decode_with_kv_cache", "BatchDecodeWithPagedKVCacheWrapper.run"),
    *("gated_delta_rule_mtp, outputs given", "good: fp4_experts", *REFERENCES),
)


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
    of_torch = rows(folder, "model")
    of_torch += [row | {"variant": "glue"} if row["variant"] == "w4-kv4" else row for row in rows(folder, "model_glue")]
    panels = (
        ("vLLM, Llama 3.1 8B", [row for row in of_vllm if row["model"] == "llama-3.1-8b"]),
        ("vLLM, Qwen3 30B A3B", [row for row in of_vllm if row["model"] == "qwen3-30b-a3b"]),
        ("transformers, Llama 3.1 8B", [row for row in of_torch if row.get("context", "2048") == "2048"]),
    )
    bars = {
        "16-bit floats (bf16)": ("0.7", ("bf16",)),
        "FP4 weights by the engine's own kernels": ("tab:orange", ("own",)),
        "FP4 weights by jitfp4": ("tab:green", ("plugin", "w4")),
        "FP4 weights and FP4 cache by jitfp4": ("darkgreen", ("plugin-kv", "glue")),
    }
    figure = new_figure(15, 5)
    axes = figure.subplots(1, 3, sharey=True)
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
    save(figure, folder, "models", "vllm", "vllm_experts", "model", "model_glue")


DRAWN = {
    "models": draw_models,
    "quantize_grid": draw_quantize,
    "norm": draw_norm,
    "gdn": draw_gdn,
    "attention": draw_attention,
    "serving": draw_serving,
    "gemm": draw_gemm,
    "gemm_tactics": draw_gemm_tactics,
    "mm_fp4": draw_mm_fp4,
    "prefill": draw_prefill,
    "append": draw_append,
    "launch": draw_launch,
    "step": draw_step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *DRAWN], help="pictures to draw; all without a name")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    arguments = parser.parse_args()
    for name in arguments.names or DRAWN:
        DRAWN[name](arguments.out)


if __name__ == "__main__":
    main()
