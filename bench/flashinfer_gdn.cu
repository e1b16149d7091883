// FlashInfer's gated delta rule prefill for sm_90 behind a C function, for bf16 and the grouped value heads that
// bench_gdn_prefill has. FLASHINFER: flashinfer/data of the package flashinfer-python 0.6.6.
//   nvcc -O3 -std=c++20 --expt-relaxed-constexpr -use_fast_math -DNDEBUG -gencode=arch=compute_90a,code=sm_90a
//     -DFLAT_SM90A_ENABLED -DCUTLASS_ENABLE_GDC_FOR_SM90=1 -static-global-template-stub=false -shared
//     -Xcompiler -fPIC -I $FLASHINFER/include -I $FLASHINFER/cutlass/include -I $FLASHINFER/cutlass/tools/util/include
//     flashinfer_gdn.cu -o libflashinfer_gdn.so
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdio>

#include "flashinfer/flat/prefill/prefill_kernel_delta_rule_sm90.cuh"

extern "C" int flashinfer_gdn(
    void* stream, void* out, void* final_state, void* q, void* k, void* v, void* initial_state, void* decay, void* beta,
    void* cu_seqlens, void* workspace, int sequences, int q_heads, int k_heads, int v_heads, int heads, int dim,
    int64_t tokens, float scale, int multiprocessors) {
  using In = nv_bfloat16;
  try {
    flat::launch_delta_rule_prefill_kernel_gbai<true, true, true, true, cutlass::arch::Sm90, In, In, float>(
        static_cast<cudaStream_t>(stream), static_cast<In*>(out), static_cast<float*>(final_state),
        static_cast<const In*>(q), static_cast<const In*>(k), static_cast<const In*>(v),
        static_cast<const float*>(initial_state), static_cast<const float*>(decay), static_cast<const float*>(beta),
        static_cast<const int64_t*>(cu_seqlens), static_cast<uint8_t*>(workspace), sequences, q_heads, k_heads, v_heads,
        heads, dim, tokens, scale, multiprocessors);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "flashinfer_gdn: %s\n", error.what());
    return 1;
  }
  return 0;
}
