// What sm_90a offers beyond plain CUDA: warpgroup matrix products, barriers in shared memory,
// clusters, and launches that overlap with the end of the kernel before.
//
// Warpgroup products (wgmma): D [64, n] += A [64, k] B [k, n], by four consecutive warps. Warp w of
// the four holds rows 16w .. 16w+15 of A (in registers) and D; lane l of it, with g = l/4, q = l%4:
//   D: d[4j], d[4j+1] = row g, columns 8j + 2q, 8j + 2q + 1; d[4j+2], d[4j+3] the same of row g
//   + 8. A: 32-bit words of rows g, g+8, g, g+8; words q of the first and, for the last two, of the
//      second half of the k channels.
// B, and A where it is no register operand, lie in shared memory in panels of rows of 128 bytes,
// beginning at a multiple of 1,024 bytes, with the 16-byte pieces of a row swizzled:
// SwizzledOffset.
#pragma once

#include <cstdint>
#include <utility>

#include "ops/cuda/common.cuh"

namespace fathom::ops::cuda {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Byte `byte` < 128 of row `row` of a panel.
__host__ __device__ constexpr uint32_t SwizzledOffset(uint32_t row, uint32_t byte) {
  return row * 128 + (byte ^ ((row & 7) << 4));
}

// Describes a panel at `address` (plus 32 bytes for each step along a row, or 2,048 for each step
// of 16 rows when the rows are the k channels).
__device__ inline uint64_t PanelDescriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{1} << 16 | ((address & 0x3ffffu) >> 4);
}

// Panels side by side, kPanelBytes of 64 rows each, for products whose columns run along the rows.
__device__ inline uint64_t PanelsDescriptor(uint32_t address) {
  constexpr uint64_t kPanel = uint64_t{64 * 128 >> 4} << 16;
  return (PanelDescriptor(address) & ~(uint64_t{0x3fff} << 16)) | kPanel;
}

// Orders earlier writes of registers and of shared memory by ordinary stores before what follows.
__device__ inline void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Shared memory written by ordinary stores becomes visible to wgmma; each writer calls this before
// the barrier.
__device__ inline void FenceForWgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#define FATHOM_WGMMA_D32(type, d)                                                                 \
  type(d[0]), type(d[1]), type(d[2]), type(d[3]), type(d[4]), type(d[5]), type(d[6]), type(d[7]), \
      type(d[8]), type(d[9]), type(d[10]), type(d[11]), type(d[12]), type(d[13]), type(d[14]),    \
      type(d[15]), type(d[16]), type(d[17]), type(d[18]), type(d[19]), type(d[20]), type(d[21]),  \
      type(d[22]), type(d[23]), type(d[24]), type(d[25]), type(d[26]), type(d[27]), type(d[28]),  \
      type(d[29]), type(d[30]), type(d[31])
#define FATHOM_WGMMA_D32_NAMES                                                      \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21," \
  "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define FATHOM_WGMMA_D64(d)                                                                       \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),  \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),  \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),  \
      "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),  \
      "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),  \
      "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),  \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define FATHOM_WGMMA_D64_NAMES                                       \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"          \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define FATHOM_WGMMA_INT(d) "+r"(d)
#define FATHOM_WGMMA_FLOAT(d) "+f"(d)

// d (+)= A B, A of unsigned bytes, B of signed bytes [n rows, 32 channels along them].
// kAdd false: d = A B.
template <bool kAdd>
__device__ inline void WgmmaU8S8(int32_t (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 " FATHOM_WGMMA_D32_NAMES
               ", {%32,%33,%34,%35}, %36, %37;"
               : FATHOM_WGMMA_D32(FATHOM_WGMMA_INT, d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd>
__device__ inline void WgmmaU8S8(int32_t (&d)[4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k32.s32.u8.s8 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, %9;"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}

// The same in bf16, 16 channels at a time. kRowsAreChannels: the rows of B's panel are the k
// channels and n runs along them, else the other way round.
template <bool kAdd, bool kRowsAreChannels = false>
__device__ inline void WgmmaBf16(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FATHOM_WGMMA_D32_NAMES
               ", {%32,%33,%34,%35}, %36, %37, 1, 1, %38;"
               : FATHOM_WGMMA_D32(FATHOM_WGMMA_FLOAT, d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0),
                 "n"(kRowsAreChannels ? 1 : 0));
}
template <bool kAdd>
__device__ inline void WgmmaBf16(float (&d)[4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, %9, "
      "1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
// A [64 rows, 16 channels along them] in shared memory too.
template <bool kAdd>
__device__ inline void WgmmaBf16(float (&d)[32], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FATHOM_WGMMA_D32_NAMES
               ", %32, %33, %34, 1, 1, 0, 0;"
               : FATHOM_WGMMA_D32(FATHOM_WGMMA_FLOAT, d)
               : "l"(a), "l"(b), "n"(kAdd ? 1 : 0));
}

// The same with 128 rows in B's panel; adds.
__device__ inline void WgmmaBf16N128(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " FATHOM_WGMMA_D64_NAMES
               ", "
               "{%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
               : FATHOM_WGMMA_D64(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// 32 rows in B's panel; A [64 rows, 16 channels along them] in shared memory.
template <bool kAdd>
__device__ inline void WgmmaBf16(float (&d)[16], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, %18, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "n"(kAdd ? 1 : 0));
}

// 128 columns along the rows of two panels of B (PanelsDescriptor), whose rows are the k channels;
// adds. A in registers, or in shared memory.
__device__ inline void WgmmaBf16Panels(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " FATHOM_WGMMA_D64_NAMES
               ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : FATHOM_WGMMA_D64(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ inline void WgmmaBf16Panels(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " FATHOM_WGMMA_D64_NAMES
               ", %64, %65, 1, 1, 1, 0, 1;"
               : FATHOM_WGMMA_D64(d)
               : "l"(a), "l"(b));
}

#undef FATHOM_WGMMA_D32
#undef FATHOM_WGMMA_D32_NAMES
#undef FATHOM_WGMMA_D64
#undef FATHOM_WGMMA_D64_NAMES
#undef FATHOM_WGMMA_INT
#undef FATHOM_WGMMA_FLOAT

// A barrier in shared memory that `count` arrivals complete; phases alternate 0, 1, 0, ...
__device__ inline void BarrierInit(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(count)
               : "memory");
}
// Barriers that a thread has initialised are ready for copies, and, after a barrier of the cluster,
// for its other blocks.
__device__ inline void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void BarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
__device__ inline void BarrierWait(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(SharedAddress(barrier)),
      "r"(phase)
      : "memory");
}

// One arrival, and so many bytes that asynchronous copies or remote stores still bring.
__device__ inline void BarrierArriveExpecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
// What other blocks of the cluster have stored is visible after it, too.
__device__ inline void BarrierWaitCluster(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(SharedAddress(barrier)),
      "r"(phase)
      : "memory");
}

// `bytes` from global memory to this block's shared memory, both at multiples of 16 bytes and of
// that size; `barrier` expects them.
__device__ inline void CopyBulk(void* shared, const void* global, uint32_t bytes,
                                uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// CopyBulk of what is read once: it leaves the L2 cache first, so that code, tables and activations
// stay there.
__device__ inline void CopyBulkOnce(void* shared, const void* global, uint32_t bytes,
                                    uint64_t* barrier) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}

// Stores a value in the shared memory of block `rank` of the cluster, at the place of this block's
// `to`, and counts its 4 bytes at the place of `barrier`.
__device__ inline void StoreRemote(float* to, float value, uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 at, bar;\n"
      "mapa.shared::cluster.u32 at, %0, %3;\n"
      "mapa.shared::cluster.u32 bar, %1, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [at], %2, [bar];\n"
      "}" ::"r"(SharedAddress(to)),
      "r"(SharedAddress(barrier)), "r"(__float_as_uint(value)), "r"(rank)
      : "memory");
}

// Stores four values in the shared memory of block `rank` of the cluster, at the place of this
// block's `to`, and counts their 16 bytes at the place of `barrier`.
__device__ inline void StoreRemote(float* to, float4 value, uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 at, bar;\n"
      "mapa.shared::cluster.u32 at, %0, %6;\n"
      "mapa.shared::cluster.u32 bar, %1, %6;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [at], {%2, %3, %4, %5}, "
      "[bar];\n"
      "}" ::"r"(SharedAddress(to)),
      "r"(SharedAddress(barrier)), "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)),
      "r"(__float_as_uint(value.z)), "r"(__float_as_uint(value.w)), "r"(rank)
      : "memory");
}

// The named barriers of a block, of so many threads.
__device__ inline void SyncNamed(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ inline void ArriveNamed(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Registers per thread of the calling warpgroup from here on.
template <int kRegisters>
__device__ inline void MoreRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void FewerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Asks for the line at an address to come to the L2 cache.
__device__ inline void PrefetchToL2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// 16 bytes from global to shared memory without waiting; zeros when not `valid`.
__device__ inline void CopyAsync16(uint32_t shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void CopyAsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ inline void CopyAsyncWaitFor() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A kernel launched by LaunchOverlapped may start while the kernel before it in the stream still
// runs. Every block of it calls WaitForPrevious before it touches memory that an earlier kernel
// writes or reads for the last time, and before it ends; kernels call LetNextStart early.
__device__ inline void WaitForPrevious() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ inline void LetNextStart() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// cluster: blocks along x that form a cluster.
template <class... Parameters, class... Arguments>
void LaunchOverlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block, int64_t shared_bytes,
                      CudaStream stream, unsigned cluster, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[3];
  unsigned count = 0;
  attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {cluster, 1, 1};
  }
  if (ThreadLaunchPolicy().one_split) {
    attributes[count].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[count++].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  FATHOM_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

// Dynamic shared memory as a T.
template <class T>
__device__ T& SharedOf() {
  extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
  static_assert(alignof(T) <= 128);
  return *reinterpret_cast<T*>(dynamic_shared_memory);
}

// Kernels that need more dynamic shared memory than the default have to say so.
template <class Kernel>
void AllowShared(Kernel kernel, int64_t bytes) {
  if (bytes <= 48 * 1024) return;
  FATHOM_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(bytes)));
}

}  // namespace fathom::ops::cuda
