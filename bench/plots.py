"""Draws the pictures of the committed results from their CSV files; needs no GPU.

python -m bench.plots [--out bench/results/h200]
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from bench.pictures import cells, lines, new_figure, rows, save
from bench.plots_models import draw_contexts, draw_models, draw_serving, draw_step


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


DRAWN = {
    "models": draw_models,
    "contexts": draw_contexts,
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
