"""The prefill kernel of sm_90a's warpgroup products: how it can be cut, where it runs, and how it is launched.

**What it costs by model, not measured.** A tile of ``t`` tokens and ``r`` query rows with d = 128 takes the tensor cores
of an SM ``r * t / 8`` cycles (2 * r * t * 128 multiplications, 2048 a cycle): 2048 for 128 x 128. Beside that run

- the expansion of NVFP4, 2.4 instructions for each of the 256 t elements of K and V (1.9 to make fp16 of a code and
  multiply it by its scale, 0.1 to store, 0.4 for loads, scales, pages), at 128 a cycle: 4.8 t cycles of issue, 614;
- the softmax, 4.5 instructions for each of r * t scores: 576, and 1024 of the unit for powers of two;
- shared memory, 128 bytes a cycle: each warpgroup reads 640 t bytes for 64 rows, the producers write 512 t:
  1792 cycles of 128 x 128, which is what stands nearest to the tensor cores.

So with 128 rows, 58 % of the issue slots and 88 % of shared memory's cycles are taken at the full rate of the tensor
cores; with 192 rows 48 % and 79 %, but then registers leave room for tiles of 64 tokens only, whose queries are read
twice as often (96 %). With 64 rows, the expansion alone would take 60 % of the issue slots. E4M3 takes 1.0 instruction
to expand, 16-bit caches none.
"""
