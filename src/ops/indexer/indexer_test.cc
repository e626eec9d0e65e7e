#include "ops/indexer/indexer.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "ops/indexer/kernels.h"
#include "ops/norm_rope_insert/rope.h"
#include "ops/quantise/quantise.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

enum class Data { kNormal, kWildScales, kTies, kZeros };

struct Case {
  RowFormat format = RowFormat::kFp4Index;
  Numerics numerics = Numerics::kProduct;
  int heads = 8;
  int top_k = 16;
  int rows_per_page = 64;
  Data data = Data::kNormal;
  uint64_t seed = 1;
  struct Part {
    int32_t first;  // position of the first token
    int32_t tokens;
  };
  std::vector<Part> parts;  // one per sequence
};

// A step with its cache: pages at a stride, blocks of all sequences shuffled.
struct Fixture {
  explicit Fixture(const Case& c) : c(c) {
    std::mt19937_64 random(c.seed);
    step.num_sequences = static_cast<int32_t>(c.parts.size());
    query_start.push_back(0);
    int32_t blocks = 0;
    for (size_t s = 0; s < c.parts.size(); ++s) {
      for (int32_t i = 0; i < c.parts[s].tokens; ++i) {
        position.push_back(c.parts[s].first + i);
        sequence.push_back(static_cast<int32_t>(s));
      }
      query_start.push_back(static_cast<int32_t>(position.size()));
      const int32_t rows = (c.parts[s].first + c.parts[s].tokens) / 4;
      const int32_t needed = std::max(1, (rows + c.rows_per_page - 1) / c.rows_per_page);
      step.max_blocks = std::max(step.max_blocks, needed);
      blocks += needed;
    }
    std::vector<int32_t> ids(blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    table.assign(c.parts.size() * step.max_blocks, -1);
    for (size_t s = 0, next = 0; s < c.parts.size(); ++s) {
      const int32_t rows = (c.parts[s].first + c.parts[s].tokens) / 4;
      const int32_t needed = std::max(1, (rows + c.rows_per_page - 1) / c.rows_per_page);
      for (int32_t b = 0; b < needed; ++b) table[s * step.max_blocks + b] = ids[next++];
    }
    const int64_t row_bytes = RowDataBytes(c.format, kIndexDim) + RowScaleBytes(c.format);
    keys.block_stride = (row_bytes * c.rows_per_page + 575) / 576 * 576 + 128;
    memory.resize(keys.block_stride * blocks);
    for (std::byte& b : memory) b = static_cast<std::byte>(random());  // rows never written
    keys.base = memory.data();
    keys.rows_per_page = c.rows_per_page;
    keys.channels = kIndexDim;
    keys.format = c.format;
    for (size_t s = 0; s < c.parts.size(); ++s) {
      const int32_t rows = (c.parts[s].first + c.parts[s].tokens) / 4;
      for (int32_t r = 0; r < rows; ++r) WriteRow(random, s, r);
    }
    const int64_t tokens = static_cast<int64_t>(position.size());
    step.num_tokens = static_cast<int32_t>(tokens);
    step.position = position.data();
    step.sequence = sequence.data();
    step.query_start = query_start.data();
    step.block_table = table.data();
    const RopeFrequencies frequencies = YarnRope(160000, {});
    rope.resize(tokens * kRopeDim);
    for (int64_t t = 0; t < tokens; ++t) {
      RopeTableRow(frequencies, position[t], rope.data() + t * kRopeDim);
    }
    const bool bf16 = c.numerics == Numerics::kProduct;
    q = RandomFloats(tokens * c.heads * kIndexDim, c.seed + 1, 1.0f, bf16);
    w = RandomFloats(tokens * c.heads, c.seed + 2, 1.0f, bf16);
    if (c.data == Data::kWildScales) MakeQueriesWild();
    if (c.data == Data::kTies) {
      for (float& x : q) x = std::round(x);
      for (float& x : w) x = x < 0 ? -1.0f : 1.0f;
    }
    if (c.data == Data::kZeros) {
      for (float& x : w) x = -std::fabs(x);
    }
  }

  // Blocks of very different scales after rotation and Hadamard, in every other group of heads.
  void MakeQueriesWild() {
    constexpr int kExponent[4] = {0, -5, -3, -6};
    for (size_t head = 0; head < w.size(); ++head) {
      const size_t token = head / c.heads;
      if ((head % c.heads / kHeadGroup + token) % 2 != 0) continue;
      float* x = q.data() + head * kIndexDim;
      for (int i = 0; i < kIndexDim; ++i) x[i] = std::ldexp(x[i], kExponent[i / 32]);
      HadamardRow(x, false);
      RotateRow(x + kIndexDim - kRopeDim, rope.data() + token * kRopeDim, /*inverse=*/true);
      if (c.numerics == Numerics::kProduct) {
        for (int i = 0; i < kIndexDim; ++i) x[i] = RoundBf16(x[i]);
      }
    }
  }

  void WriteRow(std::mt19937_64& random, size_t s, int32_t r) {
    constexpr int32_t kDrawn = 4096;  // later rows repeat an earlier one, which makes ties
    if (r >= kDrawn) {
      const auto from = static_cast<int32_t>(random() % kDrawn);
      std::memcpy(RowData(s, r), RowData(s, from), RowDataBytes(c.format, kIndexDim));
      std::memcpy(RowScale(s, r), RowScale(s, from), RowScaleBytes(c.format));
      return;
    }
    float row[kIndexDim];
    std::normal_distribution<float> normal;
    for (float& x : row) x = normal(random);
    if (c.data == Data::kWildScales && r / 16 % 3 != 1) {
      const int exponent = static_cast<int>(random() % 40) + 7;
      for (int i = 0; i < kIndexDim; ++i) row[i] *= std::ldexp(1.0f, (i / 32 * exponent) % 23 - 12);
    } else if (c.data == Data::kTies) {
      for (float& x : row) x = static_cast<float>(r % 7 == 0 ? 1 : r % 5);
    } else if (c.data == Data::kZeros && r % 3 == 0) {
      std::fill(row, row + kIndexDim, 0.0f);
    }
    EncodeRow(c.format, kIndexDim, row, RowData(s, r), RowScale(s, r));
  }

  std::byte* RowData(size_t s, int32_t r) {
    return keys.data(table[s * step.max_blocks + r / c.rows_per_page], r % c.rows_per_page);
  }
  std::byte* RowScale(size_t s, int32_t r) {
    return keys.scale(table[s * step.max_blocks + r / c.rows_per_page], r % c.rows_per_page);
  }

  IndexerArgs Args() {
    IndexerArgs args;
    args.step = &step;
    args.heads = c.heads;
    args.top_k = c.top_k;
    args.q = F32Matrix(q.data(), step.num_tokens, c.heads * kIndexDim);
    args.w = F32Matrix(w.data(), step.num_tokens, c.heads);
    args.rope = rope.data();
    args.keys = keys;
    args.numerics = c.numerics;
    return args;
  }

  Case c;
  StepView step;
  PagedRows keys;
  std::vector<int32_t> position, sequence, query_start, table;
  std::vector<std::byte> memory;
  std::vector<float> rope, q, w;
};

struct Result {
  std::vector<float> q, w, scores;
  std::vector<int32_t> selected, counts;
  bool operator==(const Result& other) const {
    auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() &&
             std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) {
               return x == y || (std::isnan(x) && std::isnan(y));
             });
    };
    return selected == other.selected && counts == other.counts && same(scores, other.scores) &&
           same(q, other.q) && same(w, other.w);
  }
};

// Runs on copies of q and w. `pool` null: the reference.
Result RunCase(Fixture& f, ThreadPool* pool, bool with_scores) {
  Result r;
  r.q = f.q;
  r.w = f.w;
  r.selected.assign(int64_t{f.step.num_tokens} * f.c.top_k, -7);
  r.counts.assign(f.step.num_tokens, -7);
  IndexerArgs args = f.Args();
  args.q.data = r.q.data();
  args.w.data = r.w.data();
  args.selected = r.selected.data();
  args.counts = r.counts.data();
  if (with_scores) {
    args.scores_stride = *std::max_element(f.position.begin(), f.position.end()) / 4 + 2;
    r.scores.assign(args.scores_stride * f.step.num_tokens, -77.0f);
    args.scores = r.scores.data();
  }
  if (pool == nullptr) IndexerReference(args);
  else IndexerCpu(args, *pool);
  return r;
}

void ExpectEqualsReference(const Case& c, const char* what) {
  SCOPED_TRACE(what);
  Fixture f(c);
  ThreadPool one(1), three(3);
  for (const bool with_scores : {false, true}) {
    const Result expected = RunCase(f, nullptr, with_scores);
    ForEachIsa([&](Isa) {
      EXPECT_TRUE(RunCase(f, &one, with_scores) == expected)
          << "one thread, scores " << with_scores;
      EXPECT_TRUE(RunCase(f, &three, with_scores) == expected)
          << "3 threads, scores " << with_scores;
    });
  }
}

constexpr RowFormat kFormats[] = {RowFormat::kFp4Index, RowFormat::kFp8Index, RowFormat::kBf16,
                                  RowFormat::kF32};

TEST(Indexer, EqualsTheReferenceBitForBitInEveryFormatAndNumerics) {
  for (const RowFormat format : kFormats) {
    for (const Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
      for (const Data data : {Data::kNormal, Data::kWildScales, Data::kTies, Data::kZeros}) {
        Case c;
        c.format = format;
        c.numerics = numerics;
        c.data = data;
        c.heads = data == Data::kWildScales ? 13 : 8;
        c.parts = {{900, 19}, {0, 30}, {2051, 1}};
        ExpectEqualsReference(c, "format, numerics, data");
      }
    }
  }
}

// The comparisons above cover both ways of summing only if the data takes both.
TEST(Indexer, NearScalesTakeTheIntegerPathAndWildOnesTheBlockPath) {
  const Isa before = CpuIsa();
  for (const IndexerKernels* kernels : {&kIndexerAvx2, &kIndexerAvx512}) {
    if (!SetCpuIsa(kernels == &kIndexerAvx2 ? Isa::kAvx2 : Isa::kAvx512)) continue;
    for (const Data data : {Data::kNormal, Data::kWildScales}) {
      Case c;
      c.data = data;
      c.parts = {{1999, 1}};
      Fixture f(c);
      const Result prepared = RunCase(f, nullptr, true);
      Fp4Tile tile;
      Fp4Heads heads;
      int aligned = 0;
      for (int32_t r = 0; r < 480; r += kTileRows) {
        kernels->expand_fp4(reinterpret_cast<const uint8_t*>(f.RowData(0, r)),
                            reinterpret_cast<const uint8_t*>(f.RowScale(0, r)), &tile);
        aligned += tile.aligned;
      }
      kernels->pack_fp4(prepared.q.data(), prepared.w.data(), c.heads, &heads);
      EXPECT_EQ(heads.aligned, data == Data::kNormal);
      EXPECT_EQ(aligned, data == Data::kNormal ? 30 : 10);
    }
  }
  SetCpuIsa(before);
}

TEST(Indexer, ManyHeadsAndPageSizes) {
  for (const int rows_per_page : {32, 64, 128, 2, 24, 50}) {
    for (const RowFormat format : {RowFormat::kFp4Index, RowFormat::kFp8Index}) {
      Case c;
      c.format = format;
      c.heads = 64;
      c.top_k = 40;
      c.rows_per_page = rows_per_page;
      c.parts = {{1000, 3}, {333, 5}, {163, 1}};
      ExpectEqualsReference(c, "page size");
    }
  }
}

TEST(Indexer, AroundTheCountOfRowsThatStillAllFit) {
  for (const int top_k : {1, 5, 64}) {
    for (int32_t first = std::max(0, 4 * top_k - 10); first <= 4 * top_k + 10; ++first) {
      Case c;
      c.top_k = top_k;
      c.parts = {{first, 1}};
      Fixture f(c);
      ThreadPool pool(1);
      const Result expected = RunCase(f, nullptr, false);
      ASSERT_EQ(expected.counts[0], std::min(top_k, (first + 1) / 4));
      ForEachIsa([&](Isa) { EXPECT_TRUE(RunCase(f, &pool, false) == expected) << first; });
    }
  }
}

TEST(Indexer, TiesGoToTheLowerRow) {
  Case c;
  c.data = Data::kZeros;  // all weights negative and rows of zeros: they tie at the top with 0
  c.top_k = 50;
  c.parts = {{3999, 1}};
  Fixture f(c);
  ThreadPool pool(2);
  for (float& x : f.w) x = -0.0f;  // every score is 0
  ForEachIsa([&](Isa) {
    const Result r = RunCase(f, &pool, false);
    for (int i = 0; i < 50; ++i) EXPECT_EQ(r.selected[i], i);
  });
}

TEST(Indexer, SelectionIsTheBruteForceOneOfTheScores) {
  for (const Data data : {Data::kNormal, Data::kTies}) {
    Case c;
    c.data = data;
    c.top_k = 100;
    c.parts = {{9000, 9}, {4000, 2}};
    Fixture f(c);
    ThreadPool pool(2);
    ForEachIsa([&](Isa) {
      const Result r = RunCase(f, &pool, true);
      const int64_t stride = static_cast<int64_t>(r.scores.size()) / f.step.num_tokens;
      for (int32_t t = 0; t < f.step.num_tokens; ++t) {
        const float* scores = r.scores.data() + t * stride;
        std::vector<int32_t> rows((f.position[t] + 1) / 4);
        std::iota(rows.begin(), rows.end(), 0);
        std::stable_sort(rows.begin(), rows.end(),
                         [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
        rows.resize(c.top_k);
        std::sort(rows.begin(), rows.end());
        EXPECT_TRUE(std::equal(rows.begin(), rows.end(), r.selected.begin() + t * c.top_k));
        EXPECT_EQ(scores[(f.position[t] + 1) / 4], -77.0f) << "wrote beyond the visible rows";
      }
    });
  }
}

TEST(Indexer, ScoresThatRiseWithTheRowRefillTheBufferManyTimes) {
  Case c;
  c.format = RowFormat::kF32;
  c.heads = 1;
  c.top_k = 33;
  c.parts = {{40000, 2}};
  Fixture f(c);
  std::fill(f.w.begin(), f.w.end(), 1.0f);
  std::fill(f.q.begin(), f.q.end(), 0.0f);
  f.q[0] = f.q[kIndexDim] = 1.0f;
  for (int32_t r = 0; r < 10000; ++r) {
    std::vector<float> row(kIndexDim, 0.0f);
    row[0] = static_cast<float>(r / 2);  // pairs tie
    EncodeRow(c.format, kIndexDim, row.data(), f.keys.data(f.table[r / 64], r % 64), nullptr);
  }
  ThreadPool pool(2);
  const Result expected = RunCase(f, nullptr, false);
  EXPECT_EQ(expected.selected[0], 9966);  // rows 9968.. and the lower one of the tied pair
  EXPECT_EQ(expected.selected[1], 9968);
  ForEachIsa([&](Isa) { EXPECT_TRUE(RunCase(f, &pool, false) == expected); });
}

TEST(Indexer, NanScoresRankLast) {
  Case c;
  c.parts = {{803, 2}, {803, 1}};
  Fixture f(c);
  f.w[3] = std::nanf("");       // every score of token 0
  f.w[2 * c.heads] = INFINITY;  // token 2: inf where the dot is positive, else NaN
  ThreadPool pool(2);
  for (const bool with_scores : {false, true}) {
    const Result expected = RunCase(f, nullptr, with_scores);
    for (int i = 0; i < c.top_k; ++i) EXPECT_EQ(expected.selected[i], i);
    ForEachIsa([&](Isa) { EXPECT_TRUE(RunCase(f, &pool, with_scores) == expected); });
  }
}

TEST(Indexer, LongContextEqualsTheReference) {
  Case c;
  c.heads = 2;
  c.top_k = 128;
  c.parts = {{1200000, 2}};  // 300,000 rows
  Fixture f(c);
  ThreadPool one(1), four(4);
  const Result expected = RunCase(f, nullptr, false);
  ForEachIsa([&](Isa) {
    EXPECT_TRUE(RunCase(f, &one, false) == expected);
    EXPECT_TRUE(RunCase(f, &four, false) == expected);
  });
}

// B83: what a token selects does not depend on how the prompt is cut.
TEST(Indexer, ChunksDoNotChangeASelection) {
  for (const RowFormat format : kFormats) {
    Case c;
    c.format = format;
    c.top_k = 24;
    c.parts = {{700, 150}};
    Fixture whole(c);
    ThreadPool pool(2);
    const Result expected = RunCase(whole, &pool, false);
    for (const int32_t chunk : {1, 7, 64}) {
      for (int32_t begin = 0; begin < 150; begin += chunk) {
        const int32_t tokens = std::min(chunk, 150 - begin);
        Fixture part = whole;
        const int32_t query_start[] = {0, tokens};
        part.step.num_tokens = tokens;
        part.step.query_start = query_start;
        part.step.position = whole.position.data() + begin;
        part.step.sequence = whole.sequence.data() + begin;
        part.step.block_table = whole.table.data();
        part.position.erase(part.position.begin(), part.position.begin() + begin);
        part.rope.erase(part.rope.begin(), part.rope.begin() + begin * kRopeDim);
        part.q.erase(part.q.begin(), part.q.begin() + begin * c.heads * kIndexDim);
        part.w.erase(part.w.begin(), part.w.begin() + begin * c.heads);
        const Result r = RunCase(part, &pool, false);
        ASSERT_TRUE(std::equal(r.selected.begin(), r.selected.end(),
                               expected.selected.begin() + begin * c.top_k))
            << "chunk " << chunk << " at " << begin;
      }
    }
  }
}

RC_GTEST_PROP(Indexer, EqualsTheReferenceOnRandomSteps, ()) {
  Case c;
  c.format = *rc::gen::elementOf(std::vector<RowFormat>(std::begin(kFormats), std::end(kFormats)));
  c.numerics = *rc::gen::element(Numerics::kProduct, Numerics::kReference);
  c.data = *rc::gen::element(Data::kNormal, Data::kNormal, Data::kWildScales, Data::kTies);
  c.heads = *rc::gen::element(1, 3, 8, 12, 16);
  c.top_k = *rc::gen::inRange(1, 70);
  c.rows_per_page = *rc::gen::element(2, 32, 64, 128);
  c.seed = *rc::gen::inRange<uint64_t>(1, 1000000);
  const int sequences = *rc::gen::inRange(1, 4);
  for (int s = 0; s < sequences; ++s) {
    c.parts.push_back({*rc::gen::inRange(0, 1500), *rc::gen::inRange(1, 40)});
  }
  Fixture f(c);
  static ThreadPool pool(3);
  const bool with_scores = *rc::gen::arbitrary<bool>();
  const Result expected = RunCase(f, nullptr, with_scores);
  ForEachIsa([&](Isa) { RC_ASSERT(RunCase(f, &pool, with_scores) == expected); });
}

}  // namespace
}  // namespace fathom::ops
