// What the interpreter of PTX asks of the emulator.
#pragma once

#include <string>

#include "cuda_emulator.h"

namespace emu {

// Everything that was launched has run.
void Finish();

[[noreturn]] void Fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string TextOf(const Code* code);
void SetCode(const Code* code);

uint64_t SyncBlockReduce(Meeting kind, uint64_t value, Where where, int name, int threads);
void ArriveBlock(int name, int threads);

uint32_t MapRank(uint32_t address, uint32_t rank);
uint32_t ClusterRank();
uint32_t ClusterSize();
char* CheckedShared(uint32_t address, size_t bytes);

void BarrierInit(uint32_t address, uint32_t count);
void BarrierForget(uint32_t address);
void BarrierArrive(uint32_t address, uint32_t count, uint32_t bytes);
bool BarrierTest(uint32_t address, uint32_t parity);
bool BarrierTryWait(uint32_t address, uint32_t parity);

// from null: from_shared.
void CopyBulk(uint32_t to, const void* from, uint32_t from_shared, uint32_t bytes,
              uint32_t barrier);
void StoreAsync(uint32_t to, const void* value, uint32_t bytes, uint32_t barrier);
void ClusterArrive();
void ClusterWait();
void GridWait();

void CopyAsync(uint32_t to, const void* from, uint32_t bytes, uint32_t read);
void CopyAsyncCommit();
void CopyAsyncWait(uint32_t pending);
void CopyAsyncWaitAll();

struct MmaShape {  // m16n8k16 of bf16 or m16n8k32 of bytes
  bool integers, a_signed, b_signed;
};
struct WgmmaShape {
  int n;
  bool integers, a_signed;  // b is signed
  bool a_shared, b_transposed;
};
void WarpMma(const MmaShape& shape, uint32_t* const d[4], const uint32_t a[4], const uint32_t b[2],
             const uint32_t c[4]);
void WarpgroupMma(const WgmmaShape& shape, void* d, const uint32_t* a, uint64_t a_descriptor,
                  uint64_t b_descriptor, bool add);
void WgmmaCommit();
void WgmmaWait(uint32_t pending);
void RunWarpProduct(void* fiber);

inline double FromBf16(uint16_t x) {
  return Bits<float>(static_cast<uint32_t>(x) << 16);
}
// sums [16][n] += a b [16][n]: the products are summed in float64, and the sum is rounded once.
// (How tensor cores add within an instruction is not specified; this depends on no order of k.)
void MultiplyBf16(const double (&a)[16][16], const double* b, int b_stride, int n, float* sums,
                  int stride);

}  // namespace emu
