// The three instances of the compressor in prefill and decode. c and g come out of the projections
// just before, so the caches hold them; the bound is the arithmetic of pooling: an exponential of
// 11 multiply-adds and 4 more operations per member and channel, at f32 peak. Bytes are c, g and
// the state read and written once, and the rows.
#include <cstdlib>

#include "ops/bench_util.h"
#include "ops/compressor/scenario.h"

namespace fathom::ops {
namespace {

struct Case {
  const char* name;
  CompressorOptions options;
  int32_t first, tokens;
};

void RunCase(const Case& c, ThreadPool& pool, const bench::Peaks& peaks) {
  CompressorScenario scenario(c.options);
  std::vector<CompressorChunk> chunks;
  for (int s = 0; s < c.options.sequences; ++s) chunks.push_back({s, c.first, c.tokens});
  scenario.Prepare(chunks);
  const double us = bench::TimeUs([&] { scenario.Run(&pool); });
  const int e = c.options.channels;
  const double width = c.options.ratio == 4 ? 2.0 * e : e;
  const double rows = (c.first + c.tokens) / c.options.ratio - c.first / c.options.ratio;
  // State: what the tokens replace; a completed group of four is also moved.
  const double state = c.options.ratio == 4
                           ? std::min(c.tokens, 4) * 2 * width + (rows > 0 ? 2 * 4 * 2 * width : 0)
                           : 2 * 3.0 * e;
  const double bytes =
      c.options.sequences * (4 * (2 * width * c.tokens + state) +
                             rows * static_cast<double>(RowDataBytes(c.options.format, e) +
                                                        RowScaleBytes(c.options.format)));
  const double members = c.options.ratio == 4 ? 8.0 * rows : c.tokens;
  const double flops = 2 * 15.0 * members * e * c.options.sequences;
  bench::Print({.op = "compressor",
                .shape = c.name,
                .threads = pool.size(),
                .us = us,
                .flops = flops,
                .bytes = bytes,
                .bound_us = bench::BoundUs(peaks, flops, 0, /*bf16=*/false)});
}

}  // namespace
}  // namespace fathom::ops

int main(int argc, char** argv) {
  using namespace fathom;
  using namespace fathom::ops;
  ThreadPool pool(argc > 1 ? std::atoi(argv[1]) : 0);
  const bench::Peaks peaks = bench::MeasurePeaks(pool);
  const CompressorOptions csa{.ratio = 4};
  const CompressorOptions csa_bf16{.ratio = 4, .format = RowFormat::kBf16};
  const CompressorOptions index_fp4{.channels = kIndexDim, .format = RowFormat::kFp4Index};
  const CompressorOptions index_fp8{.channels = kIndexDim, .format = RowFormat::kFp8Index};
  const CompressorOptions hca{.ratio = 128};
  const auto batch = [](CompressorOptions options, int sequences) {
    options.sequences = sequences;
    options.max_tokens = 256;
    return options;
  };
  const std::vector<Case> cases = {
      {"prefill512 csa fp8", csa, 0, 512},
      {"prefill512 csa bf16", csa_bf16, 0, 512},
      {"prefill512 index fp4", index_fp4, 0, 512},
      {"prefill512 index fp8", index_fp8, 0, 512},
      {"prefill512 hca fp8", hca, 0, 512},
      {"decode1 csa fp8 no row", csa, 201, 1},
      {"decode1 csa fp8 row", csa, 203, 1},
      {"decode1 index fp4 row", index_fp4, 203, 1},
      {"decode1 hca fp8 no row", hca, 201, 1},
      {"decode1 hca fp8 row", hca, 255, 1},
      {"decode64 csa fp8 row", batch(csa, 64), 203, 1},
      {"decode64 hca fp8 no row", batch(hca, 64), 201, 1},
  };
  bench::PrintHeader();
  for (const Case& c : cases) RunCase(c, pool, peaks);
}
