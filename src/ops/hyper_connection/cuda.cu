// One launch per seam, by clusters of 16 blocks. A block has a sixteenth of the channels of all
// four streams and keeps its part of `fn` in shared memory, copied while the kernel in front
// finishes. A team of eight warps takes kTokens tokens at a time through the seam; teams of the
// block at the same place of all blocks of the cluster exchange sums by stores into each other's
// shared memory, twice: the mixes, and the squares of the collapsed channels. Many tokens have two
// teams a block, so that one works while the other waits. An additional warp of each block does
// Sinkhorn's iterations beside the others' work.
//
// A mix is summed in an order that depends on D alone: a block's units of four channels of a stream
// belong to 64 parts, unit by unit; eight parts are added by exchanges between lanes, then the
// warps, then the blocks. A token's results do not depend on its batch.
#include <cooperative_groups.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "ops/hyper_connection/cuda.h"
#include "ops/hyper_connection/cuda_seam.cuh"
#include "ops/norm_rope_insert/cuda.h"

namespace fathom::ops {
namespace {

using namespace seam;
namespace cg = cooperative_groups;

constexpr int kCluster = 16;
constexpr int kWarps = 8;  // of a team
constexpr int kTeam = kWarps * 32;
constexpr int kParts = kTeam / S;  // sums over units that a block has of each mix
constexpr int kMostChunks = 8;     // of 32 pairs of channels, in a block
static_assert(kSeamCudaChannels == int64_t{kCluster} * kMostChunks * 64);

struct SeamParams {
  int64_t x_stride, o_stride, u_stride, z_stride;
  int64_t d;
  int rows;
  int slice;  // channels of a block
  int teams;
  HyperConnectionSite site;
  float* post;
  float* comb;
  const float* norm;
  int iterations;
  float eps;
  float per_channel, per_stream_channel;  // 1/D, 1/4D
  bool has_o, round;
};

// What a team shares, and what the same teams of other blocks store here.
template <int kTokens, int kMixes>
struct TeamShared {
  static constexpr int kRow = kMixes + 4;  // the mixes, the squares, zeros
  float incoming[kCluster][kTokens][kRow];
  float incoming_squares[kTokens][kCluster];
  float partial[kWarps][kTokens][kMixes];
  // Of the chunks of the streams, and of the collapsed channels; zeros where there is no chunk. A
  // barrier of the team lies between reading one of the two and writing it again.
  float squares[kTokens][kMostChunks];
  float collapsed_squares[kTokens][kMostChunks];
  uint64_t sums_here, squares_here;  // barriers, a phase for each kTokens tokens
};

// A team of a block, with the places of its shared memory.
template <class T, int kTokens, int kMixes>
struct Team {
  TeamShared<kTokens, kMixes>* shared;
  T* streams;  // [kTokens][S * slice]; a token's streams follow each other without gaps
  int index;
};

// Dynamic shared memory: fn [kMixes][S * slice], norm [slice], TeamShared of each team, streams of
// each team.
template <class T, int kTokens, int kMixes>
constexpr int64_t SharedBytes(int64_t slice, int teams) {
  constexpr int64_t kFloat = sizeof(float), kElement = sizeof(T);
  return slice * ((S * kMixes + 1) * kFloat + S * teams * kTokens * kElement) +
         teams * static_cast<int64_t>(sizeof(TeamShared<kTokens, kMixes>));
}

__device__ float SumOfChunks(const float (&squares)[kMostChunks]) {
  const float4 a = LoadFour(squares), b = LoadFour(squares + 4);
  return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

// The part of a block in a launch.
struct Share {
  int rank;
  int64_t first;            // channel
  int count;                // channels
  int group, groups, step;  // of kTokens tokens: the team's first, all, to its next
};

// Lane l < kMixes has mix l of a token, from the sums of all blocks.
template <int kTokens, int kMixes>
__device__ float MixOfLane(const SeamParams& p, const TeamShared<kTokens, kMixes>& s, int t,
                           float scale, float base) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sum[4] = {};
  if (lane < s.kRow) {
#pragma unroll
    for (int r = 0; r < kCluster; ++r) sum[r % 4] += s.incoming[r][t][lane];
  }
  const float total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  const float squares = __shfl_sync(kAll, total, kMixes);
  const float rho = rsqrtf(squares * p.per_stream_channel + kNormEps);
  return __fmaf_rn(__fmul_rn(total, rho), scale, base);
}

// Begins to copy the block's part of fn, stream by stream, and of norm. Each of four warps has a
// quarter of the rows: a copy takes a warp some fifty cycles to begin.
template <int kMixes>
__device__ void Stage(const SeamParams& p, int64_t first, int count, int quarter, float* staged,
                      float* norm, uint64_t* fn_here) {
  constexpr int kPer = kMixes / S;
  const int lane = static_cast<int>(threadIdx.x) % 32, row = quarter * kPer + lane;
  const uint32_t bytes = static_cast<uint32_t>(count) * sizeof(float);
  if (count == 0) return;
  for (int j = 0; j < S; ++j) {
    if (lane < kPer) {
      cuda::CopyBulk(staged + row * S * p.slice + j * count,
                     p.site.fn + (row * S + j) * p.d + first, bytes, &fn_here[j]);
    }
  }
  if (quarter == 0 && lane == 0 && p.norm != nullptr) {
    cuda::CopyBulk(norm, p.norm + first, bytes, &fn_here[S - 1]);
  }
}

// Brings what Renew will read of a token to L2, which may happen before the kernel in front has
// written it.
template <int kStride, class T>
__device__ void Fetch(const T* x, const T* o, const SeamParams& p, const Share& share,
                      int64_t token, int chunk) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (token >= p.rows || lane > (p.has_o ? S + 2 : S - 1)) return;
  if (lane > S)
    return cuda::PrefetchToL2(lane == S + 1 ? p.post + token * S : p.comb + token * S * S);
  const T* row =
      share.first + (lane < S ? x + token * p.x_stride + lane * p.d : o + token * p.o_stride);
#pragma unroll 1
  for (int i = chunk * 64; i < share.count; i += kStride * 64) cuda::PrefetchToL2(row + i);
}

// A warp renews every kStride-th chunk of the streams of a token, from `chunk` on, kBatch of them
// at a time; x, o and streams begin at the block's channels. Leaves the squares of each chunk.
template <int kStride, int kBatch, class T>
__device__ void Renew(T* x, const T* o, const float* post_at, const float* comb_at,
                      const SeamParams& p, int count, int chunk, T* streams,
                      float (&squares)[kMostChunks]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, pairs = count / 2;
  float post[S], comb[S * S];
  if (o != nullptr) {
    *reinterpret_cast<float4*>(post) = LoadFour(post_at);
#pragma unroll
    for (int j = 0; j < S; ++j) {
      *reinterpret_cast<float4*>(comb + j * S) = LoadFour(comb_at + j * S);
    }
  }
#pragma unroll 1
  for (; chunk * 32 < pairs; chunk += kBatch * kStride) {
    T* at[kBatch][S];
    Pair<T> in[kBatch][S] = {}, out[kBatch] = {};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pair = (chunk + i * kStride) * 32 + lane;
      at[i][0] = x + 2 * pair;
#pragma unroll
      for (int j = 1; j < S; ++j) at[i][j] = at[i][j - 1] + p.d;
      if (pair >= pairs) continue;
#pragma unroll
      for (int j = 0; j < S; ++j) in[i][j] = PairAt<T>(at[i][j]);
      if (o != nullptr) out[i] = PairAt<T>(o + 2 * pair);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pair = (chunk + i * kStride) * 32 + lane;
      if (pair - lane >= pairs) break;
      if (o != nullptr) {
        float low[S], high[S], next_low[S], next_high[S];
#pragma unroll
        for (int j = 0; j < S; ++j) {
          const float2 v = Floats(in[i][j]);
          low[j] = v.x, high[j] = v.y;
        }
        const float2 v = Floats(out[i]);
        Update(post, comb, low, v.x, next_low);
        Update(post, comb, high, v.y, next_high);
#pragma unroll
        for (int j = 0; j < S; ++j) {
          in[i][j] = Rounded<T>(next_low[j], next_high[j], p.round);
          if (pair < pairs) PairAt<T>(at[i][j]) = in[i][j];
        }
      }
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < S; ++j) {
        if (pair < pairs) PairAt<T>(streams + j * count + 2 * pair) = in[i][j];
        const float2 v = Floats(in[i][j]);
        sum = __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, sum));
      }
      sum = cuda::WarpSum(sum);
      if (lane == 0) squares[chunk + i * kStride] = sum;
    }
  }
}

// A worker's seam: kTokens tokens at a time. Between the exchanges warp w has token w % kTokens,
// and of its chunks of 32 pairs of channels every kWarps / kTokens-th.
template <class T, int kTokens, int kMixes>
__device__ void Work(T* x, const T* o, T* u, T* z, const SeamParams& p, const Share& share,
                     const Team<T, kTokens, kMixes>& team, const float* staged, const float* norm,
                     uint64_t* fn_here, bool helped) {
  constexpr int kPer = kMixes / S;  // mixes a thread sums
  constexpr int kStride = kWarps / kTokens;
  TeamShared<kTokens, kMixes>& s = *team.shared;
  const int count = share.count, pairs = count / 2;
  const int mix = static_cast<int>(threadIdx.x) % 32;
  const float scale = mix < kMixes ? p.site.scale[0] : 0.0f;
  const float base = mix < kMixes ? p.site.base[mix] : 0.0f;
  int fn_streams = 0;  // of fn that are here
  uint32_t phase = 0;
  bool first_group = true;

  for (int group = share.group; group < share.groups; group += share.step, phase ^= 1) {
    int thread = static_cast<int>(threadIdx.x) % kTeam;
    asm volatile("" : "+r"(thread));  // no register keeps an address for the next group
    const int warp = thread / 32, lane = thread % 32, t = warp % kTokens;
    const auto pair_of = [&](int i) { return (warp / kTokens + i * kStride) * 32 + lane; };
    T* const streams = team.streams + t * S * p.slice;
    const int64_t token = int64_t{group} * kTokens + t;
    const bool valid = token < p.rows;
    if (valid) {
      Renew<kStride, kTokens == 1 ? 1 : 2>(x + token * p.x_stride + share.first,
                                           p.has_o ? o + token * p.o_stride + share.first : nullptr,
                                           p.post + token * S, p.comb + token * S * S, p, count,
                                           warp / kTokens, streams, s.squares[t]);
    }
    Fetch<kStride>(x, o, p, share, token + int64_t{share.step} * kTokens, warp / kTokens);
    cuda::SyncNamed(1 + team.index, kTeam);

    // The thread's part of the mixes of its quarter of the rows, for all tokens.
    constexpr int kSums = kPer * kTokens;
    constexpr int kWidth = kTokens > 4 ? 2 : 4;  // channels at a time; more take more registers
    float sums[(kSums + 7) / 8 * 8] = {};
    const int quarter = lane / 8, units = S * count / 4;
    const float* const fn = staged + quarter * kPer * S * p.slice;
#pragma unroll 1
    for (int unit = warp * 8 + lane % 8; unit < units; unit += kParts) {
      while (4 * unit >= fn_streams * count) cuda::BarrierWait(&fn_here[fn_streams++], 0);
#pragma unroll(kTokens > 4 ? 1 : 4)
      for (int at = 4 * unit; at < 4 * unit + 4; at += kWidth) {
        float w[kPer][kWidth], v[kWidth];
#pragma unroll
        for (int m = 0; m < kPer; ++m) Load(fn + m * S * p.slice + at, w[m]);
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
          Load(team.streams + i * S * p.slice + at, v);
#pragma unroll
          for (int m = 0; m < kPer; ++m) {
            float& sum = sums[i * kPer + m];
#pragma unroll
            for (int c = 0; c < kWidth; ++c) sum = __fmaf_rn(w[m][c], v[c], sum);
          }
        }
      }
    }
    SumOverEight(sums);
    constexpr int kEach = (kSums + 7) / 8;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = lane % 8 * kEach + i;
      if (at < kSums) s.partial[warp][at / kPer][quarter * kPer + at % kPer] = sums[i];
    }
    if (first_group) {
      while (fn_streams < S) cuda::BarrierWait(&fn_here[fn_streams++], 0);  // norm, too
      ClusterWait();
    }
    first_group = false;
    cuda::SyncNamed(1 + team.index, kTeam);

    // Four sums of a token go to some of the blocks.
    constexpr int kFours = s.kRow / 4, kItems = kTokens * kFours;
    constexpr int kSenders = kItems * 16 <= kTeam ? 16 : kItems * 8 <= kTeam ? 8 : 4;
    if (thread < kItems * kSenders) {
      const int item = thread % kItems, of = item / kFours, four = item % kFours;
      float4 sum = {};
      if (four < kPer) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) Add(sum, LoadFour(&s.partial[w][of][4 * four]));
      } else {
        sum.x = SumOfChunks(s.squares[of]);
      }
#pragma unroll
      for (int r = 0; r < kCluster; r += kSenders) {
        cuda::StoreRemote(&s.incoming[share.rank][of][4 * four], sum, &s.sums_here,
                          static_cast<uint32_t>(r + thread / kItems));
      }
    }
    cuda::BarrierWaitCluster(&s.sums_here, phase);
    if (thread == 0) cuda::BarrierArriveExpecting(&s.sums_here, sizeof(s.incoming));
    const float sigmoid = Sigmoid(MixOfLane(p, s, t, scale, base)) + p.eps;
    float pre[S];
#pragma unroll
    for (int j = 0; j < S; ++j) pre[j] = __shfl_sync(kAll, sigmoid, j);

#pragma unroll 2
    for (int i = 0; i < kTokens && pair_of(i) - lane < pairs; ++i) {
      const int pair = pair_of(i);
      float squares = 0.0f;
      if (valid && pair < pairs) {
        float2 sum = {};
#pragma unroll
        for (int j = 0; j < S; ++j) {
          const float2 v = Floats(PairAt<T>(streams + j * count + 2 * pair));
          sum.x = __fmaf_rn(pre[j], v.x, sum.x), sum.y = __fmaf_rn(pre[j], v.y, sum.y);
        }
        const Pair<T> collapsed = Rounded<T>(sum.x, sum.y, p.round);
        PairAt<T>(u + token * p.u_stride + share.first + 2 * pair) = collapsed;
        PairAt<T>(streams + 2 * pair) = collapsed;  // the first stream is done
        sum = Floats(collapsed);
        squares = __fmaf_rn(sum.y, sum.y, __fmul_rn(sum.x, sum.x));
      }
      squares = cuda::WarpSum(squares);
      if (lane == 0) s.collapsed_squares[t][pair / 32] = squares;
    }
    cuda::SyncNamed(1 + team.index, kTeam + (helped ? 32 : 0));
    if (thread < kTokens * kCluster) {
      const float sum = SumOfChunks(s.collapsed_squares[thread / kCluster]);
      cuda::StoreRemote(&s.incoming_squares[thread / kCluster][share.rank], sum, &s.squares_here,
                        static_cast<uint32_t>(thread % kCluster));
    }
    // Nobody goes on or leaves before everything that comes to it is there.
    cuda::BarrierWaitCluster(&s.squares_here, phase);
    if (thread == 0) cuda::BarrierArriveExpecting(&s.squares_here, sizeof(s.incoming_squares));
    if (p.norm == nullptr || !valid) continue;
    float4 total = LoadFour(s.incoming_squares[t]);
#pragma unroll
    for (int r = 4; r < kCluster; r += 4) Add(total, LoadFour(&s.incoming_squares[t][r]));
    const float squares = (total.x + total.y) + (total.z + total.w);
    const float r = rsqrtf(squares * p.per_channel + kNormEps);
#pragma unroll 2
    for (int i = 0; i < kTokens && pair_of(i) < pairs; ++i) {
      const int pair = pair_of(i);
      const float2 v = Floats(PairAt<T>(streams + 2 * pair));
      const float2 weight = *reinterpret_cast<const float2*>(norm + 2 * pair);
      PairAt<T>(z + token * p.z_stride + share.first + 2 * pair) =
          Rounded<T>(weight.x * (v.x * r), weight.y * (v.y * r), p.round);
    }
  }
}

// The helping warp's seam: post and comb of token `t` of the team's.
template <class T, int kTokens, int kMixes>
__device__ void Help(const SeamParams& p, const Share& share, const Team<T, kTokens, kMixes>& team,
                     int t) {
  TeamShared<kTokens, kMixes>& s = *team.shared;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool mix = lane < kMixes;
  const float scale = mix ? p.site.scale[lane < S ? 0 : lane < 2 * S ? 1 : 2] : 0.0f;
  const float base = mix ? p.site.base[lane] : 0.0f;
  uint32_t phase = 0;
  for (int group = share.group; group < share.groups; group += share.step, phase ^= 1) {
    const int64_t token = int64_t{group} * kTokens + t;
    cuda::BarrierWaitCluster(&s.sums_here, phase);
    const float value = MixOfLane(p, s, t, scale, base);
    cuda::ArriveNamed(1 + team.index, kTeam + 32);
    if (token >= p.rows) continue;
    if (lane >= S && lane < 2 * S) p.post[token * S + lane - S] = 2.0f * Sigmoid(value);
    float comb[S * S];
    Sinkhorn(value, p.iterations, p.eps, comb);
    if (lane == 0) {
#pragma unroll
      for (int j = 0; j < S; ++j) {
        *reinterpret_cast<float4*>(p.comb + (token * S + j) * S) = LoadFour(comb + j * S);
      }
    }
  }
}

__host__ __device__ constexpr int MostTeams(int tokens) {
  return tokens >= 4 ? 2 : 1;
}

template <class T, int kTokens, int kMixes>
__global__ void __launch_bounds__(MostTeams(kTokens) * kTeam + 32)
    Seam(T* x, const T* o, T* u, T* z, const __grid_constant__ SeamParams p) {
  constexpr int kMostTeams = MostTeams(kTokens);
  extern __shared__ __align__(16) unsigned char seam_memory[];
  __shared__ uint64_t fn_here[S];  // a barrier for each stream's part of fn; norm with the last
  const auto thread = static_cast<int>(threadIdx.x);
  const auto rank = static_cast<int>(cg::this_cluster().block_rank());
  const int cluster = static_cast<int>(blockIdx.x) / kCluster;
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  const bool worker = thread < p.teams * kTeam;
  auto* const staged = reinterpret_cast<float*>(seam_memory);
  float* const norm = staged + kMixes * S * p.slice;
  auto* const shared = reinterpret_cast<TeamShared<kTokens, kMixes>*>(norm + p.slice);
  auto* const streams = reinterpret_cast<T*>(shared + p.teams);
  const int64_t first = int64_t{rank} * p.slice;
  const auto count = static_cast<int>(max(int64_t{0}, min(int64_t{p.slice}, p.d - first)));
  // With two teams the blocks of the cluster share their tokens.
  const int helper_team = p.teams > 1 ? rank / kTokens % 2 : 0;
  const int helper_token = rank - helper_team * kTokens;
  const bool helped = kMixes > S && helper_token < kTokens;
  const int index = worker ? thread / kTeam : helper_team;
  const Team<T, kTokens, kMixes> team = {shared + index, streams + index * kTokens * S * p.slice,
                                         index};
  const Share share = {rank,
                       first,
                       count,
                       cluster + index * clusters,
                       (p.rows + kTokens - 1) / kTokens,
                       clusters * p.teams};

  // One thread initialises all barriers: lanes would take turns, and racecheck confuses barriers of
  // one instruction.
  if (thread == 0) {
#pragma unroll
    for (int j = 0; j < S; ++j) cuda::BarrierInit(&fn_here[j], 1);
#pragma unroll 1
    for (int i = 0; i < (kMostTeams > 1 ? p.teams : 1); ++i) {
      cuda::BarrierInit(&shared[i].sums_here, 1);
      cuda::BarrierInit(&shared[i].squares_here, 1);
    }
    cuda::FenceBarrierInit();
#pragma unroll
    for (int j = 0; j < S; ++j) {
      const int rows = kMixes + (j + 1 == S && p.norm != nullptr ? 1 : 0);
      cuda::BarrierArriveExpecting(&fn_here[j],
                                   static_cast<uint32_t>(rows * count) * sizeof(float));
    }
#pragma unroll 1
    for (int i = 0; i < (kMostTeams > 1 ? p.teams : 1); ++i) {
      TeamShared<kTokens, kMixes>& s = shared[i];
      cuda::BarrierArriveExpecting(&s.sums_here, sizeof(s.incoming));
      cuda::BarrierArriveExpecting(&s.squares_here, sizeof(s.incoming_squares));
    }
  }
  constexpr int kChunks = kTokens * kMostChunks;
  static_assert(kMostTeams * kChunks <= kTeam);
  if (thread < p.teams * kChunks) {
    TeamShared<kTokens, kMixes>& s = shared[thread / kChunks];
    const int t = thread % kChunks / kMostChunks, chunk = thread % kMostChunks;
    s.squares[t][chunk] = s.collapsed_squares[t][chunk] = 0.0f;
  }
  __syncthreads();
  if (const int quarter = thread / 32 - (kWarps - S); quarter >= 0 && quarter < S) {
    Stage<kMixes>(p, first, count, quarter, staged, norm, fn_here);
  }
  cuda::LetNextStart();
  if (worker) {
    const int warp = thread % kTeam / 32;
    Fetch<kWarps / kTokens>(x, o, p, share, int64_t{share.group} * kTokens + warp % kTokens,
                            warp / kTokens);
  }
  __syncwarp();
  ClusterArrive();

  cuda::WaitForPrevious();
  if (worker && share.group < share.groups) [[likely]] {
    Work(x, o, u, z, p, share, team, staged, norm, fn_here, helped && index == helper_team);
    return;
  }
  ClusterWait();
  if (!worker && helped) Help(p, share, team, helper_token);
}

// The streams after the last site.
template <class T>
__global__ void __launch_bounds__(kTeam)
    Last(T* x, const T* o, const __grid_constant__ SeamParams p) {
  cuda::LetNextStart();
  cuda::WaitForPrevious();
  const int64_t t = blockIdx.x, i = int64_t{blockIdx.y} * kTeam + threadIdx.x;
  if (i >= p.d) return;
  float post[S], comb[S * S], in[S], out[S];
  for (int k = 0; k < S; ++k) post[k] = p.post[t * S + k];
  for (int k = 0; k < S * S; ++k) comb[k] = p.comb[t * S * S + k];
  x += t * p.x_stride + i;
  for (int j = 0; j < S; ++j) in[j] = cuda::ToFloat(x[j * p.d]);
  Update(post, comb, in, cuda::ToFloat(o[t * p.o_stride + i]), out);
  for (int k = 0; k < S; ++k) x[k * p.d] = cuda::FromFloat<T>(cuda::RoundIf(out[k], p.round));
}

constexpr int64_t kMostShared = (227 << 10) - 64;  // bytes a block may have, less fn_here

// How many clusters of a kernel the device runs at once; makes the kernel ready for them.
int ClustersAtOnce(const void* kernel, unsigned threads, int64_t shared) {
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, unsigned, int64_t>, int> known;
  int device = 0;
  FATHOM_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  const auto [entry, fresh] = known.try_emplace({device, kernel, threads, shared}, 0);
  if (!fresh) return entry->second;
  FATHOM_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(kMostShared)));
  FATHOM_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = kCluster;
  config.blockDim = threads;
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.attrs = &attribute;
  config.numAttrs = 1;
  FATHOM_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&entry->second, kernel, &config));
  return entry->second;
}

// A way to launch: kTokens tokens a team. With all mixes a block has a multiprocessor to itself:
// two would wait for each other.
template <class T, int kTokens, int kMixes>
struct Plan {
  int teams;
  int64_t shared;
  unsigned threads;
  int wanted, most, rounds;  // clusters; rounds is 0 where shared memory does not suffice

  Plan(const SeamParams& params, int teams)
      : teams(teams),
        shared(std::max(SharedBytes<T, kTokens, kMixes>(params.slice, teams),
                        kMixes > S ? kMostShared / 2 + 1 : 0)),
        threads(static_cast<unsigned>(teams * kTeam + 32)),
        wanted((params.rows + kTokens * teams - 1) / (kTokens * teams)),
        most(shared > kMostShared
                 ? 0
                 : ClustersAtOnce(reinterpret_cast<const void*>(Seam<T, kTokens, kMixes>), threads,
                                  shared)),
        rounds(most == 0 ? 0 : (wanted + most - 1) / most) {}

  void Launch(const HyperConnectionArgs& args, SeamParams params, CudaStream stream) const {
    params.teams = teams;
    FATHOM_CUDA_CHECK(most > 0 ? cudaSuccess : cudaErrorInvalidConfiguration);
    cuda::LaunchOverlapped(
        Seam<T, kTokens, kMixes>, static_cast<unsigned>(std::min(wanted, most) * kCluster), threads,
        shared, stream, kCluster, static_cast<T*>(args.x.data), static_cast<const T*>(args.o.data),
        static_cast<T*>(args.u.data), static_cast<T*>(args.z.data), params);
  }
};

}  // namespace

void HyperConnectionCuda(const HyperConnectionArgs& args, CudaStream stream) {
  const int64_t d = args.x.cols / S;
  constexpr int kUnit = 4 * kCluster;
  const SeamParams params = {.x_stride = args.x.stride,
                             .o_stride = args.o.stride,
                             .u_stride = args.u.stride,
                             .z_stride = args.z.stride,
                             .d = d,
                             .rows = static_cast<int>(args.x.rows),
                             .slice = static_cast<int>((d + kUnit - 1) / kUnit * 4),
                             .teams = 1,
                             .site = args.site != nullptr ? *args.site : HyperConnectionSite{},
                             .post = args.post,
                             .comb = args.comb,
                             .norm = args.norm,
                             .iterations = args.sinkhorn_iterations,
                             .eps = args.eps,
                             .per_channel = 1.0f / static_cast<float>(d),
                             .per_stream_channel = 1.0f / static_cast<float>(S * d),
                             .has_o = !args.o.empty(),
                             .round = args.numerics == Numerics::kProduct};
  if (args.x.rows == 0) return;
  if (args.site == nullptr) {
    if (params.has_o) {
      const dim3 grid(static_cast<unsigned>(args.x.rows), cuda::Blocks(d, kTeam));
      cuda::WithActivationType(args.x.dtype, [&]<class T>(T) {
        cuda::LaunchOverlapped(Last<T>, grid, kTeam, 0, stream, 1, static_cast<T*>(args.x.data),
                               static_cast<const T*>(args.o.data), params);
      });
    }
    if (args.norm != nullptr) {
      RmsNormCuda({.x = TopRows(args.u, args.x.rows),
                   .weight = args.norm,
                   .y = TopRows(args.z, args.x.rows),
                   .numerics = args.numerics},
                  stream);
    }
    return;
  }
  FATHOM_CUDA_CHECK(d <= kSeamCudaChannels ? cudaSuccess : cudaErrorInvalidValue);
  if (params.site.mixes == S || args.x.dtype != DType::kBF16) {
    cuda::WithActivationType(args.x.dtype, [&]<class T>(T) {
      if (params.site.mixes == S) Plan<T, 1, S>(params, 1).Launch(args, params, stream);
      else Plan<T, 1, 24>(params, 1).Launch(args, params, stream);
    });
    return;
  }
  using T = __nv_bfloat16;
  const Plan<T, 1, 24> one(params, 1);
  if (one.rounds == 1) return one.Launch(args, params, stream);
  const Plan<T, 2, 24> two(params, 1);
  if (two.rounds == 1) return two.Launch(args, params, stream);
  const Plan<T, 4, 24> four(params, 1), two_fours(params, 2);
  if (four.rounds == 1) return four.Launch(args, params, stream);
  const Plan<T, 8, 24> two_eights(params, 2);
  // Rounds of eight tokens a team take 1.75 times as long.
  if (two_eights.rounds > 0 && 7 * two_eights.rounds < 4 * two_fours.rounds) {
    return two_eights.Launch(args, params, stream);
  }
  if (two_fours.rounds > 0) return two_fours.Launch(args, params, stream);
  if (four.rounds > 0) return four.Launch(args, params, stream);
  one.Launch(args, params, stream);
}

}  // namespace fathom::ops
