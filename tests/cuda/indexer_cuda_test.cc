// IndexerCuda against the reference: bit for bit where indexer/cuda.h promises it, else within a
// tolerance of the scores. What is selected must always be exactly the best of the scores that the
// device computed. The CPU backend, equal to the reference to the bit by its own tests, stands in
// for it where the reference would take minutes.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "device_memory.h"
#include "ops/indexer/cuda.h"
#include "ops/norm_rope_insert/rope.h"
#include "ops/quantise/quantise.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

enum class Data { kNormal, kWildScales, kTies };

struct Case {
  RowFormat format = RowFormat::kFp4Index;
  Numerics numerics = Numerics::kProduct;
  int heads = 8;
  int top_k = 16;
  int rows_per_page = 64;
  Data data = Data::kNormal;
  int max_pages = 1 << 20;  // blocks beyond that many share physical pages
  uint64_t seed = 1;
  struct Part {
    int32_t first;  // position of the first token
    int32_t tokens;
  };
  std::vector<Part> parts;  // one per sequence
};

// A step with its cache in host memory. Pages that no block of a table names are NaN bytes.
struct Fixture {
  explicit Fixture(const Case& c) : c(c) {
    std::mt19937_64 random(c.seed);
    query_start.push_back(0);
    for (size_t s = 0; s < c.parts.size(); ++s) {
      for (int32_t i = 0; i < c.parts[s].tokens; ++i) {
        position.push_back(c.parts[s].first + i);
        sequence.push_back(static_cast<int32_t>(s));
      }
      query_start.push_back(static_cast<int32_t>(position.size()));
      step.max_blocks = std::max(step.max_blocks, BlocksOf(s));
    }
    int32_t blocks = 0;
    for (size_t s = 0; s < c.parts.size(); ++s) blocks += BlocksOf(s);
    const int32_t pages = std::min(blocks, c.max_pages);
    std::vector<int32_t> ids(blocks);
    for (int32_t i = 0; i < blocks; ++i) ids[i] = i % pages + 1;  // page 0 stays NaN
    std::shuffle(ids.begin(), ids.end(), random);
    table.assign(c.parts.size() * step.max_blocks, 0);
    int32_t next = 0;
    for (size_t s = 0; s < c.parts.size(); ++s) {
      for (int32_t b = 0; b < BlocksOf(s); ++b) table[s * step.max_blocks + b] = ids[next++];
    }
    const int64_t row_bytes = RowDataBytes(c.format, kIndexDim) + RowScaleBytes(c.format);
    keys.block_stride = (row_bytes * c.rows_per_page + 575) / 576 * 576 + 128;
    memory.assign(keys.block_stride * (pages + 1), std::byte{0xff});
    keys.base = memory.data();
    keys.rows_per_page = c.rows_per_page;
    keys.channels = kIndexDim;
    keys.format = c.format;
    if (pages < blocks) {
      for (int32_t page = 1; page <= pages; ++page) {
        for (int32_t r = 0; r < c.rows_per_page; ++r) WriteRow(random, page, r);
      }
    } else {
      for (size_t s = 0; s < c.parts.size(); ++s) {
        for (int32_t r = 0; r < RowsOf(s); ++r) {
          WriteRow(random, table[s * step.max_blocks + r / c.rows_per_page], r % c.rows_per_page);
        }
      }
    }
    const auto tokens = static_cast<int64_t>(position.size());
    step.num_tokens = static_cast<int32_t>(tokens);
    step.num_sequences = static_cast<int32_t>(c.parts.size());
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
    if (c.data == Data::kWildScales) {
      for (size_t i = 0; i < q.size(); ++i) q[i] = std::ldexp(q[i], -static_cast<int>(i / 32 % 7));
    } else if (c.data == Data::kTies) {
      for (float& x : q) x = std::round(x);
      for (float& x : w) x = x < 0 ? -1.0f : 1.0f;
    }
  }
  Fixture(const Fixture&) = delete;

  int32_t RowsOf(size_t s) const { return (c.parts[s].first + c.parts[s].tokens) / 4; }
  int32_t BlocksOf(size_t s) const {
    return std::max(1, (RowsOf(s) + c.rows_per_page - 1) / c.rows_per_page);
  }

  void WriteRow(std::mt19937_64& random, int32_t page, int32_t r) {
    float row[kIndexDim];
    std::normal_distribution<float> normal;
    for (float& x : row) x = normal(random);
    if (c.data == Data::kWildScales) {
      const int exponent = static_cast<int>(random() % 40) + 7;
      for (int i = 0; i < kIndexDim; ++i) row[i] *= std::ldexp(1.0f, (i / 32 * exponent) % 23 - 12);
    } else if (c.data == Data::kTies) {
      const auto value = static_cast<float>(random() % 5);
      for (float& x : row) x = value;
    }
    EncodeRow(c.format, kIndexDim, row, keys.data(page, r), keys.scale(page, r));
  }

  int32_t Visible(int32_t token) const { return (position[token] + 1) / 4; }

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
  int64_t scores_stride = 0;
};

IndexerArgs ArgsOf(const Fixture& f, Result* r, bool with_scores) {
  r->scores_stride =
      with_scores ? *std::max_element(f.position.begin(), f.position.end()) / 4 + 2 : 0;
  IndexerArgs args;
  args.step = &f.step;
  args.heads = f.c.heads;
  args.top_k = f.c.top_k;
  args.keys = f.keys;
  args.numerics = f.c.numerics;
  args.scores_stride = r->scores_stride;
  return args;
}

Result OnHost(const Fixture& f, bool with_scores, ThreadPool* pool) {
  Result r;
  r.q = f.q;
  r.w = f.w;
  IndexerArgs args = ArgsOf(f, &r, with_scores);
  r.selected.assign(int64_t{f.step.num_tokens} * f.c.top_k, -7);
  r.counts.assign(f.step.num_tokens, -7);
  r.scores.assign(r.scores_stride * f.step.num_tokens, -77.0f);
  args.q = F32Matrix(r.q.data(), f.step.num_tokens, f.c.heads * kIndexDim);
  args.w = F32Matrix(r.w.data(), f.step.num_tokens, f.c.heads);
  args.rope = f.rope.data();
  args.selected = r.selected.data();
  args.counts = r.counts.data();
  if (with_scores) args.scores = r.scores.data();
  pool == nullptr ? IndexerReference(args) : IndexerCpu(args, *pool);
  return r;
}

Result OnDevice(const Fixture& f, bool with_scores, bool one_launch = false) {
  Result r;
  IndexerArgs args = ArgsOf(f, &r, with_scores);
  const int64_t tokens = f.step.num_tokens;
  const DType type = DeviceActivationType(f.c.numerics);
  const DeviceStep step(f.step);
  const DeviceMatrix q(f.q, tokens, f.c.heads * kIndexDim, type);
  const DeviceMatrix w(f.w, tokens, f.c.heads, type);
  const DeviceArray<float> rope(f.rope);
  const DeviceArray<std::byte> memory(f.memory);
  const DeviceArray<int32_t> selected(std::vector<int32_t>(tokens * f.c.top_k, -7));
  const DeviceArray<int32_t> counts(std::vector<int32_t>(tokens, -7));
  const DeviceArray<float> scores(std::vector<float>(r.scores_stride * tokens, -77.0f));
  const DeviceArray<std::byte> scratch(IndexerCudaScratchBytes(tokens));
  args.step = &step.view();
  args.q = q.view();
  args.w = w.view();
  args.rope = rope.data();
  args.keys.base = memory.data();
  args.selected = selected.data();
  args.counts = counts.data();
  if (with_scores) args.scores = scores.data();
  // A single launch does without scratch: what falls back to three would not get far.
  IndexerCuda(args, one_launch ? nullptr : scratch.data(), nullptr, one_launch);
  r.q = q.Download();
  r.w = w.Download();
  r.selected = selected.Download();
  r.counts = counts.Download();
  r.scores = scores.Download();
  return r;
}

bool IsExact(const Case& c) {
  return c.format == RowFormat::kF32 ||
         (c.numerics == Numerics::kReference && c.format != RowFormat::kFp4Index);
}

bool SameFloats(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) {
           return x == y || (std::isnan(x) && std::isnan(y));
         });
}

// The contract's selection from the scores of `r`: the best rows, ties to the lower, ascending.
void ExpectSelectsBest(const Fixture& f, const Result& r) {
  for (int32_t t = 0; t < f.step.num_tokens; ++t) {
    const float* scores = r.scores.data() + t * r.scores_stride;
    const int32_t visible = f.Visible(t), count = std::min(visible, f.c.top_k);
    const auto key = [&](int32_t row) {
      return std::isnan(scores[row])                      ? -std::numeric_limits<double>::infinity()
             : std::isinf(scores[row]) && scores[row] < 0 ? -std::numeric_limits<double>::max()
                                                          : static_cast<double>(scores[row]);
    };
    std::vector<int32_t> rows(visible);
    std::iota(rows.begin(), rows.end(), 0);
    std::nth_element(
        rows.begin(), rows.begin() + std::max(count - 1, 0), rows.end(),
        [&](int32_t a, int32_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; });
    rows.resize(count);
    std::sort(rows.begin(), rows.end());
    rows.resize(f.c.top_k, -1);
    const auto* got = r.selected.data() + int64_t{t} * f.c.top_k;
    ASSERT_TRUE(std::equal(rows.begin(), rows.end(), got)) << "token " << t;
    ASSERT_EQ(r.counts[t], count);
  }
}

// Scores within tolerance, and a selection that differs from the exact one at near ties only.
void ExpectNear(const Fixture& f, const Result& got, const Result& expected) {
  int64_t differing = 0, total = 0;
  for (int32_t t = 0; t < f.step.num_tokens; ++t) {
    const float* wanted = expected.scores.data() + t * expected.scores_stride;
    const float* scores = got.scores.data() + t * got.scores_stride;
    const int32_t visible = f.Visible(t);
    float largest = 0;
    for (int32_t j = 0; j < visible; ++j) largest = std::max(largest, std::fabs(wanted[j]));
    const float tolerance = 2e-5f * largest;
    for (int32_t j = 0; j < visible; ++j) {
      ASSERT_NEAR(scores[j], wanted[j], tolerance) << "token " << t << " row " << j;
    }
    ASSERT_EQ(scores[visible], -77.0f) << "wrote beyond the visible rows";
    const int32_t* rows = got.selected.data() + int64_t{t} * f.c.top_k;
    const int32_t* exact = expected.selected.data() + int64_t{t} * f.c.top_k;
    const int32_t count = got.counts[t];
    ASSERT_EQ(count, expected.counts[t]);
    float bar = INFINITY;
    for (int32_t i = 0; i < count; ++i) bar = std::min(bar, wanted[exact[i]]);
    for (int32_t i = 0; i < count; ++i) {
      ASSERT_TRUE(rows[i] >= 0 && rows[i] < visible);
      ASSERT_TRUE(i == 0 || rows[i - 1] < rows[i]);
      ASSERT_GE(wanted[rows[i]], bar - 2 * tolerance) << "token " << t << " row " << rows[i];
      differing += !std::binary_search(exact, exact + count, rows[i]);
    }
    for (int32_t i = count; i < f.c.top_k; ++i) ASSERT_EQ(rows[i], -1);
    total += count;
  }
  EXPECT_LE(differing, 2 + total / 200) << "of " << total;
}

void ExpectMatchesReference(const Case& c, ThreadPool* pool = nullptr) {
  SCOPED_TRACE(testing::Message() << "format " << static_cast<int>(c.format) << " numerics "
                                  << static_cast<int>(c.numerics) << " heads " << c.heads
                                  << " top_k " << c.top_k << " data " << static_cast<int>(c.data)
                                  << " page " << c.rows_per_page);
  const Fixture f(c);
  const Result expected = OnHost(f, true, pool);
  const Result got = OnDevice(f, true);
  EXPECT_TRUE(SameFloats(got.q, expected.q)) << "prepared queries";
  EXPECT_TRUE(SameFloats(got.w, expected.w)) << "prepared weights";
  ExpectSelectsBest(f, got);
  if (IsExact(c)) {
    EXPECT_TRUE(SameFloats(got.scores, expected.scores));
    EXPECT_EQ(got.selected, expected.selected);
    EXPECT_EQ(got.counts, expected.counts);
  } else {
    ExpectNear(f, got, expected);
  }
  // Without scores the same selection, and tokens that see few rows keep their queries.
  const Result plain = OnDevice(f, false);
  EXPECT_EQ(plain.selected, got.selected);
  EXPECT_EQ(plain.counts, got.counts);
  for (int32_t t = 0; t < f.step.num_tokens; ++t) {
    const int64_t width = int64_t{c.heads} * kIndexDim;
    const std::vector<float>& wanted = f.Visible(t) <= c.top_k ? f.q : got.q;
    EXPECT_TRUE(std::equal(wanted.begin() + t * width, wanted.begin() + (t + 1) * width,
                           plain.q.begin() + t * width))
        << "query of token " << t;
  }
}

constexpr RowFormat kFormats[] = {RowFormat::kFp4Index, RowFormat::kFp8Index, RowFormat::kBf16,
                                  RowFormat::kF32};

TEST(IndexerCuda, MatchesReferenceInEveryFormatAndNumerics) {
  FATHOM_NEEDS_DEVICE();
  for (const RowFormat format : kFormats) {
    for (const Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
      for (const Data data : {Data::kNormal, Data::kWildScales, Data::kTies}) {
        Case c;
        c.format = format;
        c.numerics = numerics;
        c.data = data;
        c.heads = data == Data::kWildScales ? 13 : 8;
        c.parts = {{900, 19}, {0, 30}, {2051, 1}};
        ExpectMatchesReference(c);
      }
    }
  }
}

TEST(IndexerCuda, HeadCountsAndStepSizes) {
  FATHOM_NEEDS_DEVICE();
  ThreadPool pool(0);
  for (const RowFormat format : {RowFormat::kFp4Index, RowFormat::kFp8Index}) {
    for (const int heads : {1, 4, 8, 24, 64, 128}) {
      for (const int32_t tokens : {1, 3, 127, 129}) {
        Case c;
        c.format = format;
        c.heads = heads;
        c.top_k = 40;
        c.parts = {{700, tokens}, {333, 2}, {tokens, 1}};
        ExpectMatchesReference(c, &pool);
      }
    }
  }
}

TEST(IndexerCuda, PageSizes) {
  FATHOM_NEEDS_DEVICE();
  ThreadPool pool(0);
  for (const int rows_per_page : {2, 24, 32, 50, 64, 128}) {
    for (const RowFormat format : kFormats) {
      Case c;
      c.format = format;
      c.heads = 64;
      c.top_k = 40;
      c.rows_per_page = rows_per_page;
      c.parts = {{1000, 3}, {333, 5}, {163, 1}};
      ExpectMatchesReference(c, &pool);
    }
  }
}

TEST(IndexerCuda, ManyTokensScanInOneRangeEach) {
  FATHOM_NEEDS_DEVICE();
  ThreadPool pool(0);
  Case c;
  c.top_k = 512;
  c.parts = {{9000, 150}, {5000, 150}, {17, 20}};
  ExpectMatchesReference(c, &pool);
}

TEST(IndexerCuda, AroundTheCountOfRowsThatStillAllFit) {
  FATHOM_NEEDS_DEVICE();
  for (const int top_k : {1, 5, 64}) {
    for (int32_t first = std::max(0, 4 * top_k - 10); first <= 4 * top_k + 10; ++first) {
      Case c;
      c.top_k = top_k;
      c.parts = {{first, 1}};
      ExpectMatchesReference(c);
    }
  }
}

// Blocks share a few pages, so almost every score is tied many times over.
TEST(IndexerCuda, LongContextsMatchReference) {
  FATHOM_NEEDS_DEVICE();
  ThreadPool pool(0);
  for (const int top_k : {128, 512, 1024}) {
    for (const RowFormat format : {RowFormat::kFp4Index, RowFormat::kF32}) {
      Case c;
      c.format = format;
      c.heads = 4;
      c.top_k = top_k;
      c.max_pages = 37;
      c.parts = {{1'200'000, 2}, {1'048'575, 1}, {131'071, 1}};  // 300,000 rows and fewer
      ExpectMatchesReference(c, &pool);
    }
  }
  Case c;
  c.heads = 64;
  c.top_k = 512;
  c.max_pages = 1000;
  c.parts = {{1'048'575, 1}};
  ExpectMatchesReference(c, &pool);
}

TEST(IndexerCuda, ScoresThatRiseWithTheRowRefillTheBufferManyTimes) {
  FATHOM_NEEDS_DEVICE();
  for (const int32_t tokens : {2, 300}) {
    Case c;
    c.format = RowFormat::kF32;
    c.heads = 1;
    c.top_k = 33;
    c.parts = {{40'000, tokens}};
    Fixture f(c);
    std::fill(f.w.begin(), f.w.end(), 1.0f);
    std::fill(f.q.begin(), f.q.end(), 0.0f);
    for (int32_t t = 0; t < tokens; ++t) f.q[int64_t{t} * kIndexDim] = 1.0f;
    for (int32_t r = 0; r < f.RowsOf(0); ++r) {
      std::vector<float> row(kIndexDim, 0.0f);
      row[0] = static_cast<float>(r / 2);  // pairs tie
      EncodeRow(c.format, kIndexDim, row.data(), f.keys.data(f.table[r / 64], r % 64), nullptr);
    }
    ThreadPool pool(0);
    const Result expected = OnHost(f, false, &pool), got = OnDevice(f, false);
    EXPECT_EQ(got.selected, expected.selected);
    EXPECT_EQ(got.selected[0], 9966);  // rows 9968.. and the lower one of the tied pair
  }
}

TEST(IndexerCuda, NanScoresRankLast) {
  FATHOM_NEEDS_DEVICE();
  Case c;
  c.parts = {{803, 2}, {803, 1}};
  Fixture f(c);
  f.w[3] = std::nanf("");       // every score of token 0
  f.w[2 * c.heads] = INFINITY;  // token 2: inf where the dot is positive, else NaN
  for (const bool with_scores : {false, true}) {
    const Result expected = OnHost(f, with_scores, nullptr), got = OnDevice(f, with_scores);
    if (with_scores) {
      ExpectSelectsBest(f, got);
      for (size_t i = 0; i < got.scores.size(); ++i) {
        const float a = got.scores[i], b = expected.scores[i];
        if (std::isfinite(b)) {
          ASSERT_NEAR(a, b, 1e-4f * std::fabs(b) + 1e-5f);
        } else {
          ASSERT_TRUE(a == b || (std::isnan(a) && std::isnan(b)));
        }
      }
    }
    for (int i = 0; i < c.top_k; ++i) EXPECT_EQ(got.selected[i], i);
  }
}

// What a token selects does not depend on how the prompt is cut, nor its scores' bits.
TEST(IndexerCuda, ChunksDoNotChangeAnything) {
  FATHOM_NEEDS_DEVICE();
  for (const RowFormat format : kFormats) {
    Case c;
    c.format = format;
    c.heads = 64;
    c.top_k = 24;
    c.parts = {{7000, 150}};
    Fixture f(c);
    const Result whole = OnDevice(f, true);
    const StepView all = f.step;
    const std::vector<float> q = f.q, w = f.w, rope = f.rope;
    const std::vector<int32_t> position = f.position;
    for (int32_t begin = 0; begin < 150;) {
      const int32_t tokens = std::min(begin < 5 ? 1 : 64, 150 - begin);
      f.query_start = {0, tokens};
      f.position.assign(position.begin() + begin, position.begin() + begin + tokens);
      const int64_t width = int64_t{c.heads} * kIndexDim;
      f.q.assign(q.begin() + begin * width, q.begin() + (begin + tokens) * width);
      f.w.assign(w.begin() + begin * c.heads, w.begin() + (begin + tokens) * c.heads);
      f.rope.assign(rope.begin() + begin * kRopeDim, rope.begin() + (begin + tokens) * kRopeDim);
      f.step = all;
      f.step.num_tokens = tokens;
      f.step.query_start = f.query_start.data();
      f.step.position = f.position.data();
      const Result part = OnDevice(f, true);
      EXPECT_TRUE(std::equal(part.selected.begin(), part.selected.end(),
                             whole.selected.begin() + int64_t{begin} * c.top_k));
      for (int32_t t = 0; t < tokens; ++t) {
        const float* a = part.scores.data() + t * part.scores_stride;
        const float* b = whole.scores.data() + (begin + t) * whole.scores_stride;
        EXPECT_TRUE(std::equal(a, a + f.Visible(t), b)) << "token " << begin + t;
      }
      begin += tokens;
    }
  }
}

// Nearly all scores tie, so that the sampled floor lets in more than the candidates' list holds.
TEST(IndexerCuda, TiesBeyondTheCandidates) {
  FATHOM_NEEDS_DEVICE();
  for (const int32_t tokens : {1, 300}) {
    Case c;
    c.format = RowFormat::kF32;
    c.heads = 1;
    c.top_k = 64;
    c.parts = {{160'000, tokens}};
    Fixture f(c);
    std::fill(f.w.begin(), f.w.end(), 1.0f);
    std::fill(f.q.begin(), f.q.end(), 0.0f);
    for (int32_t t = 0; t < tokens; ++t) f.q[int64_t{t} * kIndexDim] = 1.0f;
    for (int32_t r = 0; r < f.RowsOf(0); ++r) {
      std::vector<float> row(kIndexDim, 0.0f);
      row[0] = r % 1000 == 999 ? 2.0f : r == 7 || r % 3 == 1 ? 1.0f : 0.5f;
      EncodeRow(c.format, kIndexDim, row.data(), f.keys.data(f.table[r / 64], r % 64), nullptr);
    }
    const Result got = OnDevice(f, true);
    ExpectSelectsBest(f, got);
    const Result plain = OnDevice(f, false);
    EXPECT_EQ(plain.selected, got.selected);
  }
}

TEST(IndexerCuda, PaddingSelectsNothing) {
  FATHOM_NEEDS_DEVICE();
  Case c;
  c.parts = {{900, 2}};
  Fixture f(c);
  const Result expected = OnDevice(f, false);
  f.position[1] = -1;
  const Result got = OnDevice(f, false);
  EXPECT_EQ(got.counts[0], expected.counts[0]);
  EXPECT_EQ(got.counts[1], 0);
  for (int i = 0; i < c.top_k; ++i) {
    EXPECT_EQ(got.selected[i], expected.selected[i]);
    EXPECT_EQ(got.selected[c.top_k + i], -1);
  }
}

void ExpectSame(const Result& got, const Result& expected) {
  EXPECT_EQ(got.selected, expected.selected);
  EXPECT_EQ(got.counts, expected.counts);
  EXPECT_TRUE(SameFloats(got.q, expected.q)) << "queries";
  EXPECT_TRUE(SameFloats(got.w, expected.w)) << "weights";
}

void ExpectOneLaunchGivesTheSame(const Fixture& f) {
  SCOPED_TRACE(testing::Message() << "format " << static_cast<int>(f.c.format) << " heads "
                                  << f.c.heads << " top_k " << f.c.top_k << " data "
                                  << static_cast<int>(f.c.data) << " page " << f.c.rows_per_page
                                  << " tokens " << f.step.num_tokens);
  ExpectSame(OnDevice(f, false, /*one_launch=*/true), OnDevice(f, false));
}

constexpr RowFormat kPackedFormats[] = {RowFormat::kFp4Index, RowFormat::kFp8Index,
                                        RowFormat::kBf16};

TEST(IndexerCuda, FewTokensOfShortContexts) {
  FATHOM_NEEDS_DEVICE();
  constexpr int32_t kVisible[] = {4096, 513, 0, 2048, 511, 4095, 1, 512};
  for (const RowFormat format : kPackedFormats) {
    for (const int heads : {8, 13, 64, 128}) {
      for (const Data data : {Data::kNormal, Data::kWildScales, Data::kTies}) {
        for (int32_t tokens = 1; tokens <= 8; ++tokens) {
          if (heads % 64 != 0 && tokens % 3 != 1) continue;
          Case c;
          c.format = format;
          c.heads = heads;
          c.top_k = 512;
          c.rows_per_page = tokens % 4 == 2 ? 128 : 64;
          c.data = data;
          c.seed = static_cast<uint64_t>(tokens);
          for (int32_t t = 0; t < tokens; ++t) {
            const int32_t visible = kVisible[(t + heads) % 8];
            c.parts.push_back({std::max(0, 4 * visible - 1), 1});
          }
          ExpectOneLaunchGivesTheSame(Fixture(c));
        }
      }
    }
  }
}

// Tokens of one prompt, whose rows begin and end within tiles and which may all be selected.
TEST(IndexerCuda, FewTokensOfOneSequenceInOneLaunch) {
  FATHOM_NEEDS_DEVICE();
  for (const RowFormat format : kPackedFormats) {
    for (const int32_t first : {0, 61, 250, 1021, 5000, 16'376}) {
      for (const int top_k : {1, 16, 512, 5000}) {
        Case c;
        c.format = format;
        c.heads = 64;
        c.top_k = top_k;
        c.data = first == 5000 ? Data::kTies : Data::kNormal;
        c.parts = {{first, 8}};
        ExpectOneLaunchGivesTheSame(Fixture(c));
      }
    }
  }
}

// Gives a head a query that FP4 keys take the slow way: its blocks' scales lie far apart.
void MakeUnaligned(Fixture* f, int64_t token, int head) {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  float* const q = f->q.data() + (token * f->c.heads + head) * kIndexDim;
  float wanted[64];  // of the first two blocks after the Hadamard rotation, and of the last two
  for (int i = 0; i < 64; ++i) wanted[i] = i < 32 ? normal(random) : normal(random) * 0x1p-6f;
  std::fill(q, q + kIndexDim, 0.0f);
  for (unsigned i = 0; i < 64; ++i) {
    for (unsigned j = 0; j < 64; ++j) {
      q[i] += (std::popcount(i & j) % 2 == 0 ? 0.125f : -0.125f) * wanted[j];
    }
  }
}

TEST(IndexerCuda, OneLaunchWithUnalignedQueries) {
  FATHOM_NEEDS_DEVICE();
  for (const int heads : {8, 64}) {
    Case c;
    c.heads = heads;
    c.top_k = 512;
    c.parts = {{9000, 1}, {12'000, 2}, {16'383, 1}};
    Fixture f(c);
    MakeUnaligned(&f, 0, 5);
    MakeUnaligned(&f, 2, heads - 1);
    ExpectOneLaunchGivesTheSame(f);
  }
}

TEST(IndexerCuda, OneLaunchWithNanWeightsAndPadding) {
  FATHOM_NEEDS_DEVICE();
  for (const RowFormat format : kPackedFormats) {
    Case c;
    c.format = format;
    c.top_k = 512;
    c.parts = {{9000, 1}, {4096, 1}, {3000, 1}, {16'383, 1}, {700, 1}};
    Fixture f(c);
    f.w[3] = std::nanf("");       // every score of the first token
    f.w[2 * c.heads] = INFINITY;  // of the third: inf where the dot is positive, else NaN
    f.position[1] = f.position[4] = -1;
    ExpectOneLaunchGivesTheSame(f);
  }
}

// Every kernel of a step with little work; rings have a test of their own.
TEST(IndexerCuda, SmallStepsOfEveryKernel) {
  FATHOM_NEEDS_DEVICE();
  for (const RowFormat format : kFormats) {
    Case c;
    c.format = format;
    c.parts = {{300, 3}, {5, 1}, {1061, 1}};
    ExpectMatchesReference(c);
  }
  Case c;
  c.numerics = Numerics::kReference;
  c.parts = {{300, 2}};
  ExpectMatchesReference(c);
  for (const RowFormat format : kPackedFormats) {  // one launch, its tiles in all blocks
    Case few;
    few.format = format;
    few.heads = 64;
    few.parts = {{2700, 1}, {900, 1}};
    ExpectOneLaunchGivesTheSame(Fixture(few));
  }
}

// The same rows in pages of half a tile, which no bulk copy can fetch: not by a ring, then.
void HalvePages(Fixture* f) {
  const PagedRows from = f->keys;
  const int64_t pages = static_cast<int64_t>(f->memory.size()) / from.block_stride;
  const int parts = from.rows_per_page / 32;
  const int64_t data_bytes = RowDataBytes(from.format, kIndexDim);
  const int64_t scale_bytes = RowScaleBytes(from.format);
  std::vector<std::byte> memory(pages * parts * (32 * (data_bytes + scale_bytes) + 128));
  f->keys.base = memory.data();
  f->keys.rows_per_page = 32;
  f->keys.block_stride = 32 * (data_bytes + scale_bytes) + 128;
  for (int32_t page = 0; page < pages; ++page) {
    for (int r = 0; r < from.rows_per_page; ++r) {
      const int32_t to = page * parts + r / 32;
      std::copy_n(from.data(page, r), data_bytes, f->keys.data(to, r % 32));
      std::copy_n(from.scale(page, r), scale_bytes, f->keys.scale(to, r % 32));
    }
  }
  f->memory = std::move(memory);
  std::vector<int32_t> table;
  for (const int32_t page : f->table) {
    for (int i = 0; i < parts; ++i) table.push_back(page * parts + i);
  }
  f->table = std::move(table);
  f->step.block_table = f->table.data();
  f->step.max_blocks *= parts;
}

void ExpectRingGivesTheSame(Fixture* fixture) {
  const Fixture& f = *fixture;
  SCOPED_TRACE(testing::Message() << "format " << static_cast<int>(f.c.format) << " heads "
                                  << f.c.heads << " data " << static_cast<int>(f.c.data) << " page "
                                  << f.c.rows_per_page << " tokens " << f.step.num_tokens);
  const Result got[] = {OnDevice(f, true), OnDevice(f, false)};
  HalvePages(fixture);
  for (const bool with_scores : {true, false}) {
    const Result expected = OnDevice(f, with_scores);
    ExpectSame(got[with_scores ? 0 : 1], expected);
    EXPECT_TRUE(SameFloats(got[with_scores ? 0 : 1].scores, expected.scores)) << "scores";
  }
}

// Some 140 tiles a block: every stage is filled more than ten times. The second case's blocks have
// several tokens each, whose rings end at any stage.
TEST(IndexerCuda, ScansGoThroughTheirRingManyTimes) {
  FATHOM_NEEDS_DEVICE();
  for (const RowFormat format : kPackedFormats) {
    for (const int heads : {8, 13, 32, 64, 128}) {
      for (const Data data : {Data::kNormal, Data::kWildScales, Data::kTies}) {
        Case c;
        c.format = format;
        c.heads = heads;
        c.top_k = 512;
        c.data = data;
        c.max_pages = 301;
        c.rows_per_page = heads == 32 ? 256 : 64;
        c.parts = {{1'200'000, 1}, {1'199'743, 1}, {77, 1},        {640'001, 1}, {1'048'575, 1},
                   {2100, 1},      {0, 1},         {1'500'000, 1}, {999'999, 1}, {1'111'111, 1}};
        if (data == Data::kNormal) {
          Fixture f(c);
          ExpectRingGivesTheSame(&f);
        }
        c.parts.clear();
        for (int32_t s = 0; s < 300; ++s) c.parts.push_back({s * 7919 % 20'011, 1});
        Fixture f(c);
        ExpectRingGivesTheSame(&f);
      }
    }
  }
}

// Some ten tiles a block: every stage is filled at least twice. Selections read groups.
TEST(IndexerCuda, SmallRing) {
  FATHOM_NEEDS_DEVICE();
  for (const RowFormat format : kPackedFormats) {
    Case c;
    c.format = format;
    c.top_k = 64;
    c.max_pages = 31;
    for (int32_t s = 0; s < 10; ++s) c.parts.push_back({70'000 - 700 * s, 1});
    Fixture f(c);
    ExpectRingGivesTheSame(&f);
  }
}

TEST(IndexerCuda, RingWithUnusualQueriesWeightsAndPadding) {
  FATHOM_NEEDS_DEVICE();
  for (const int heads : {8, 64}) {
    Case c;
    c.heads = heads;
    c.top_k = 64;
    c.max_pages = 301;
    for (int32_t s = 0; s < 40; ++s) c.parts.push_back({70'000 - 1701 * s, 1});
    Fixture f(c);
    MakeUnaligned(&f, 3, 5);
    MakeUnaligned(&f, 17, heads - 1);
    f.w[int64_t{5} * heads] = std::nanf("");
    f.w[int64_t{6} * heads] = INFINITY;
    f.w[int64_t{7} * heads + 1] = 0x1p110f;  // does not bear the ring's factor
    f.w[int64_t{8} * heads + 1] = 0x1p-120f;
    f.position[0] = f.position[20] = f.position[39] = -1;
    ExpectRingGivesTheSame(&f);
  }
}

// What a selection of few tokens meets: groups that tie, all groups of one neighbourhood, few
// groups, k near the number of groups, contexts of more groups than a thread holds.
class IndexerCudaRows : public testing::TestWithParam<int32_t> {};

TEST_P(IndexerCudaRows, SelectsExactlyWhereverTheBestLie) {
  FATHOM_NEEDS_DEVICE();
  enum class Shape { kRandom, kRamp, kOneNeighbourhood, kFewValues, kAllEqual, kMostlyNan };
  const int32_t rows = GetParam();
  for (const int top_k : {1, 37, 512, 1024}) {
    for (const Shape shape : {Shape::kRandom, Shape::kRamp, Shape::kOneNeighbourhood,
                              Shape::kFewValues, Shape::kAllEqual, Shape::kMostlyNan}) {
      SCOPED_TRACE(testing::Message()
                   << rows << " rows, top_k " << top_k << ", shape " << static_cast<int>(shape));
      Case c;
      c.format = RowFormat::kF32;
      c.heads = 1;
      c.top_k = top_k;
      c.max_pages = 1;
      c.parts = {{4 * rows - 1, 1}};
      Fixture f(c);
      std::fill(f.w.begin(), f.w.end(), 1.0f);
      std::fill(f.q.begin(), f.q.end(), 0.0f);
      f.q[0] = 1.0f;
      // A page of its own for every 64 rows, of which only the first channel counts.
      const int64_t stride = 64 * int64_t{kIndexDim} * 4;
      f.memory.assign((rows + 63) / 64 * stride, std::byte{});
      f.keys.base = f.memory.data();
      f.keys.block_stride = stride;
      std::iota(f.table.begin(), f.table.end(), 0);
      std::mt19937_64 random(static_cast<uint64_t>(rows + top_k));
      std::normal_distribution<float> normal;
      for (int32_t r = 0; r < rows; ++r) {
        float value = 0;
        switch (shape) {
          case Shape::kRandom: value = std::fabs(normal(random)); break;
          case Shape::kRamp: value = 1.0f + static_cast<float>(r / 3); break;
          case Shape::kOneNeighbourhood:
            value = std::fabs(normal(random)) + (r / 9000 == 1 ? 8.0f : 0.0f);
            break;
          case Shape::kFewValues: value = static_cast<float>(random() % 50); break;
          case Shape::kAllEqual: value = 3.0f; break;
          // Of an infinite weight: 0 * inf where the key is not positive.
          case Shape::kMostlyNan: value = r % 997 == 5 ? 1.0f : -1.0f; break;
        }
        std::memcpy(f.keys.data(r / 64, r % 64), &value, 4);
      }
      if (shape == Shape::kMostlyNan) f.w[0] = INFINITY;
      const Result got = OnDevice(f, true);
      ExpectSelectsBest(f, got);
      EXPECT_EQ(OnDevice(f, false).selected, got.selected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Contexts, IndexerCudaRows, testing::Values(8193, 9000, 70'001, 300'001));

TEST(IndexerCuda, ScratchIsBounded) {
  const int64_t most = IndexerCudaScratchBytes(264);
  EXPECT_LE(most, 84 << 20);
  EXPECT_EQ(IndexerCudaScratchBytes(1 << 20), most);
}

}  // namespace
}  // namespace fathom::ops
