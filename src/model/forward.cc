// DeepSeek-V4's forward pass in the model's order (design: model.md 2-7). One function per part;
// every result is a named buffer that a Tap may read. Ops come from a Backend; nothing here knows
// where they run.
#include "model/forward.h"

#include <algorithm>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "ops/norm_rope_insert/rope.h"

namespace fathom {
namespace {

using ops::kHeadDim;
using ops::kIndexDim;
using ops::kRopeDim;
using ops::kStreams;

int64_t Align64(int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

// Every buffer of a step, laid out from config and options alone.
struct Buffers {
  // Residual streams and the site in flight.
  MatrixView x;           // [T, 4*D]
  MatrixView u, z, o;     // [T, D] collapsed, normalised, site output
  float* post = nullptr;  // [T, 4]
  float* comb = nullptr;  // [T, 16]
  // Attention.
  MatrixView qa;                // [T, q]
  MatrixView q;                 // [T, H*512]; attention output overwrites it
  MatrixView kv;                // [T, 512]
  MatrixView c, g;              // [T, 1024] compressor projections
  MatrixView index_c, index_g;  // [T, 256] the indexer's
  MatrixView index_q;           // [T, Hi*128]
  MatrixView index_w;           // [T, Hi]
  MatrixView grouped;           // [T, G*R]
  int32_t* selected = nullptr;  // [T, top_k]
  int32_t* counts = nullptr;    // [T]
  ops::PagedRows step_rows;     // [T] window rows of this step
  float* rope_plain = nullptr;  // [T, 64]
  float* rope_yarn = nullptr;   // [T, 64]
  // FFN.
  MatrixView gate;             // [T, E]
  int32_t* experts = nullptr;  // [T, k]
  float* routes = nullptr;     // [T, k]
  // Head.
  MatrixView gathered, head_u, head_z;

  // Assigns every buffer from `base`; with base == null only counts. Returns the bytes.
  int64_t LayOut(const ModelConfig& config, const ForwardOptions& options, DType activation,
                 std::byte* base) {
    int64_t bytes = 0;
    const int64_t t = options.max_tokens;
    const int64_t r = options.max_logit_rows;
    const int64_t d = config.hidden_size;
    const auto take = [&](int64_t size) {
      std::byte* at = base == nullptr ? nullptr : base + bytes;
      bytes += Align64(size);
      return at;
    };
    const auto typed = [&](DType type, int64_t rows, int64_t cols) {
      return MatrixView{take(rows * cols * ElementBytes(type)), type, rows, cols, cols};
    };
    const auto matrix = [&](int64_t rows, int64_t cols) { return typed(activation, rows, cols); };
    const auto f32_matrix = [&](int64_t rows, int64_t cols) {
      return typed(DType::kF32, rows, cols);
    };
    const auto floats = [&](int64_t n) { return reinterpret_cast<float*>(take(n * 4)); };
    const auto ints = [&](int64_t n) { return reinterpret_cast<int32_t*>(take(n * 4)); };
    x = matrix(t, kStreams * d);
    u = matrix(t, d);
    z = matrix(t, d);
    o = matrix(t, d);
    post = floats(t * kStreams);
    comb = floats(t * kStreams * kStreams);
    qa = matrix(t, config.q_lora_rank);
    q = matrix(t, config.num_heads * int64_t{kHeadDim});
    kv = matrix(t, kHeadDim);
    c = f32_matrix(t, 2 * kHeadDim);
    g = f32_matrix(t, 2 * kHeadDim);
    index_c = f32_matrix(t, 2 * kIndexDim);
    index_g = f32_matrix(t, 2 * kIndexDim);
    index_q = matrix(t, config.index_heads * int64_t{kIndexDim});
    index_w = matrix(t, config.index_heads);
    grouped = matrix(t, config.o_groups * config.o_lora_rank);
    selected = ints(t * config.index_top_k);
    counts = ints(t);
    rope_plain = floats(t * kRopeDim);
    rope_yarn = floats(t * kRopeDim);
    gate = f32_matrix(t, config.num_experts);
    experts = ints(t * config.experts_per_token);
    routes = floats(t * config.experts_per_token);
    gathered = matrix(r, kStreams * d);
    head_u = matrix(r, d);
    head_z = matrix(r, d);
    // Wide enough for every row format: float32 rows are the largest.
    step_rows = {.base = take(t * kHeadDim * 4),
                 .block_stride = 0,
                 .rows_per_page = static_cast<int32_t>(t),
                 .channels = kHeadDim,
                 .format = ops::RowFormat::kBf16};
    return bytes;
  }
};

}  // namespace

struct Forward::Impl : Buffers {
  const ModelConfig& config;
  const Weights& weights;
  ops::Backend& backend;
  ForwardOptions options;

  ops::RopeFrequencies plain_rope;  // SWA layers
  ops::RopeFrequencies yarn_rope;   // CSA and HCA layers

  int64_t workspace_bytes = 0;

  // The step being run.
  const ops::StepView* step = nullptr;
  Tap* tap = nullptr;
  int64_t tokens = 0;
  bool branches = false;  // independent parts run beside each other

  Impl(const ModelConfig& c_, const Weights& w, ops::Backend& b, const ForwardOptions& o_)
      : config(c_), weights(w), backend(b), options(o_) {
    plain_rope = ops::PlainRope(config.rope_theta);
    yarn_rope = ops::YarnRope(config.compress_rope_theta, config.yarn);
    const DType activation = backend.ActivationType(options.numerics);
    workspace_bytes = WorkspaceBytes(config, options, activation);
    LayOut(config, options, activation, backend.Allocate(workspace_bytes));
  }

  MatrixView Rows(const MatrixView& m) const { return TopRows(m, tokens); }

  // Views the first `cols` columns' worth of a buffer as a dense [T, cols] matrix.
  MatrixView Dense(const MatrixView& m, int64_t cols) const {
    return {m.data, m.dtype, tokens, cols, cols};
  }

  void Show(const std::string& name, const MatrixView& value) {
    if (tap != nullptr && tap->Wants(name)) tap->Put(name, value);
  }
  void ShowInts(const std::string& name, int32_t* data, int64_t cols) {
    Show(name, {data, DType::kI32, tokens, cols, cols});
  }

  ops::LinearArgs Product(const MatrixView& in, const ops::LinearWeight& weight,
                          const MatrixView& out, bool round = true) const {
    return {
        .x = in, .weight = &weight, .y = out, .numerics = options.numerics, .round_output = round};
  }
  void Linear(const MatrixView& in, const ops::LinearWeight& weight, const MatrixView& out) {
    backend.Linear(Product(in, weight, out));
  }
  // Whether they have been computed, all at once.
  bool Together(std::span<const ops::LinearArgs> products) {
    if (!backend.TakesTogether(products)) return false;
    backend.LinearTogether(products);
    return true;
  }

  // Residual update of the site before (unless it is the first), mixes and norm of the next site.
  void Seam(const HyperConnectionWeights* next, const std::vector<float>* norm, bool first) {
    backend.HyperConnection({.x = Rows(x),
                             .o = first ? MatrixView{} : Rows(o),
                             .site = next == nullptr ? nullptr : &next->site,
                             .post = post,
                             .comb = comb,
                             .u = u,
                             .norm = norm == nullptr ? nullptr : norm->data(),
                             .z = z,
                             .sinkhorn_iterations = config.sinkhorn_iterations,
                             .eps = config.hc_eps,
                             .numerics = options.numerics});
  }

  // A compressor's two products of z.
  struct Projections {
    ops::LinearArgs values, gates;
  };
  // `c` and `g` hold them.
  Projections Project(const CompressorWeights& compressor, const MatrixView& c,
                      const MatrixView& g) const {
    const int64_t width = compressor.wkv.out;
    return {Product(Rows(z), compressor.wkv, Dense(c, width), false),
            Product(Rows(z), compressor.wgate, Dense(g, width), false)};
  }

  // projected: the products are there.
  void Compress(const CompressorWeights& compressor, const Projections& products, bool projected,
                int ratio, int channels, float* state, int64_t state_stride,
                const ops::PagedRows& rows) {
    if (!projected) {
      backend.Linear(products.values);
      backend.Linear(products.gates);
    }
    backend.Compressor({.step = step,
                        .ratio = ratio,
                        .channels = channels,
                        .c = products.values.y,
                        .g = products.gates.y,
                        .ape = compressor.ape.data(),
                        .norm = compressor.norm.data(),
                        .rope = &yarn_rope,
                        .state = state,
                        .state_stride = state_stride,
                        .rows = rows,
                        .round_kv = options.kv_rounding,
                        .numerics = options.numerics});
  }

  void Branch(int lane) {
    if (branches) backend.Branch(lane);
  }
  void Await(int lane) {
    if (branches) backend.Await(lane);
  }

  // z -> o (model.md 4 and 5). Few tokens leave most of a GPU idle: the query and the window row,
  // the compressed row, and the indexer's choice are then computed beside each other, all products
  // of z in front of them at once.
  void Attention(const std::string& name, int layer, const LayerKv& cache) {
    const LayerWeights& w = weights.layers[layer];
    const LayerKind kind = config.kind(layer);
    const float* rope = kind == LayerKind::kSwa ? rope_plain : rope_yarn;
    const bool compresses = kind != LayerKind::kSwa, csa = kind == LayerKind::kCsa;
    const bool commits = backend.InsertCommits(*step);

    step_rows.format = cache.ring.format;

    const ops::LinearArgs latent = Product(Rows(z), w.wq_a, Rows(qa));
    const ops::LinearArgs window = Product(Rows(z), w.wkv, Rows(kv));
    const ops::LinearArgs index_weights = Product(Rows(z), w.index_weights_proj, Rows(index_w));
    const Projections row = Project(w.compressor, c, g);
    const Projections index_row = Project(w.index_compressor, index_c, index_g);
    const ops::LinearArgs of_z[] = {latent,        window,           row.values,     row.gates,
                                    index_weights, index_row.values, index_row.gates};
    const bool projected = Together({of_z, csa ? 7u : compresses ? 4u : 2u});

    Branch(0);
    if (!projected) backend.Linear(latent);
    backend.RmsNorm(
        {.x = Rows(qa), .weight = w.q_norm.data(), .y = Rows(qa), .numerics = options.numerics});
    Show(name + ".attn.q_latent", Rows(qa));
    if (!projected) {
      Branch(1);
      backend.Linear(window);
      Branch(0);
      Await(1);  // the window row
    }
    const ops::LinearArgs of_qa[] = {Product(Rows(qa), w.wq_b, Rows(q)),
                                     Product(Rows(qa), w.index_wq_b, Rows(index_q))};
    const bool queries = csa && Together(of_qa);
    if (csa) {
      Branch(1);
      Compress(w.index_compressor, index_row, projected, 4, kIndexDim, cache.index_state,
               cache.index_state_stride, cache.index_keys);
      Branch(2);
      if (!projected) backend.Linear(index_weights);
      Await(0);  // the query latent, or all products of it
      if (!queries) backend.Linear(of_qa[1]);
      Await(1);  // the indexer's row
      Select(name, cache);
    }
    Branch(0);
    if (!queries) backend.Linear(of_qa[0]);
    backend.NormRopeInsert({.q = Rows(q),
                            .kv = Rows(kv),
                            .kv_norm = w.kv_norm.data(),
                            .rope = rope,
                            .step_rows = step_rows,
                            .heads = config.num_heads,
                            .round_kv = options.kv_rounding,
                            .numerics = options.numerics,
                            .step = commits ? step : nullptr,
                            .ring = commits ? cache.ring : ops::PagedRows{}});
    Show(name + ".attn.q", Rows(q));
    if (compresses) {
      Branch(1);
      Compress(w.compressor, row, projected, csa ? 4 : 128, kHeadDim, cache.state,
               cache.state_stride, cache.compressed);
    }
    if (branches) backend.Join();
    backend.SparseAttention({.step = step,
                             .heads = config.num_heads,
                             .q = Rows(q),
                             .step_rows = step_rows,
                             .ring = cache.ring,
                             .compressed = cache.compressed,
                             .selected = csa ? selected : nullptr,
                             .counts = csa ? counts : nullptr,
                             .top_k = config.index_top_k,
                             .sink = w.attn_sink.data(),
                             .out = Rows(q),
                             .numerics = options.numerics});
    Show(name + ".attn.heads", Rows(q));
    if (!commits) {
      Branch(1);
      backend.WindowCommit({.step = step, .step_rows = step_rows, .ring = cache.ring});
      Branch(0);
    }
    backend.OutputProjection({.o = Rows(q),
                              .rope = rope,
                              .heads = config.num_heads,
                              .groups = config.o_groups,
                              .wo_a = &w.wo_a,
                              .y = Rows(grouped),
                              .numerics = options.numerics});
    Linear(Rows(grouped), w.wo_b, Rows(o));
    if (branches) backend.Join();
  }

  // The indexer's choice; scores are materialised only for a tap that asks (a debugging aid that
  // allocates at every step).
  void Select(const std::string& name, const LayerKv& cache) {
    float* scores = nullptr;
    int64_t stride = 0;
    const bool wants = tap != nullptr && tap->Wants(name + ".indexer.scores");
    if (wants) {
      std::vector<int32_t> position(static_cast<size_t>(tokens));
      backend.ToHost(position.data(), step->position, tokens * int64_t{sizeof(int32_t)});
      for (int32_t p : position) stride = std::max<int64_t>(stride, (p + 1) / 4);
      stride = std::max<int64_t>(stride, 1);
      scores = reinterpret_cast<float*>(backend.Allocate(tokens * stride * 4));
    }
    backend.Indexer({.step = step,
                     .heads = config.index_heads,
                     .top_k = config.index_top_k,
                     .q = Rows(index_q),
                     .w = Rows(index_w),
                     .rope = rope_yarn,
                     .keys = cache.index_keys,
                     .selected = selected,
                     .counts = counts,
                     .scores = scores,
                     .scores_stride = stride,
                     .numerics = options.numerics});
    if (wants) Show(name + ".indexer.scores", F32Matrix(scores, tokens, stride));
    ShowInts(name + ".indexer.selected", selected, config.index_top_k);
  }

  // z -> o (model.md 7).
  void MixtureOfExperts(const std::string& name, int layer) {
    const LayerWeights& w = weights.layers[layer];
    backend.GateAndRoute({.x = Rows(z),
                          .weight = &w.gate,
                          .y = Rows(gate),
                          .numerics = options.numerics,
                          .round_output = false},
                         {.logits = Rows(gate),
                          .bias = w.gate_bias.empty() ? nullptr : w.gate_bias.data(),
                          .tid2eid = w.tid2eid,
                          .token = step->token,
                          .top_k = config.experts_per_token,
                          .scale = config.routed_scaling_factor,
                          .experts = experts,
                          .weights = routes});
    ShowInts(name + ".router.experts", experts, config.experts_per_token);
    Show(name + ".router.weights", F32Matrix(routes, tokens, config.experts_per_token));
    backend.Experts({.z = Rows(z),
                     .experts = w.experts.data(),
                     .num_experts = config.num_experts,
                     .shared = &w.shared,
                     .chosen = experts,
                     .weights = routes,
                     .top_k = config.experts_per_token,
                     .limit = config.swiglu_limit,
                     .shared_limit = options.shared_clamp ? config.swiglu_limit
                                                          : std::numeric_limits<float>::infinity(),
                     .y = Rows(o),
                     .numerics = options.numerics});
  }

  void ShowMixes(const std::string& name) {
    Show(name + ".post", F32Matrix(post, tokens, kStreams));
    Show(name + ".comb", F32Matrix(comb, tokens, kStreams * kStreams));
  }

  void Run(const KvView& kv_view, std::span<const int32_t> logit_rows, const MatrixView& logits) {
    backend.BeginStep(*step);
    backend.RopeTables(*step, plain_rope, rope_plain);
    backend.RopeTables(*step, yarn_rope, rope_yarn);
    backend.Embed({.table = weights.embed, .token = step->token, .x = Rows(x)});
    Show("embed", Dense(x, kStreams * config.hidden_size));

    Seam(&weights.layers[0].hc_attn, &weights.layers[0].attn_norm, true);
    for (int layer = 0; layer < config.num_layers; ++layer) {
      const LayerWeights& w = weights.layers[layer];
      const std::string name = tap == nullptr ? "" : "layers." + std::to_string(layer);
      ShowMixes(name + ".hc_attn");
      Show(name + ".attn.in", Rows(z));
      Attention(name, layer, kv_view.layers[layer]);
      Show(name + ".attn.out", Rows(o));

      Seam(&w.hc_ffn, &w.ffn_norm, false);
      ShowMixes(name + ".hc_ffn");
      Show(name + ".ffn.in", Rows(z));
      MixtureOfExperts(name, layer);
      Show(name + ".ffn.out", Rows(o));

      const LayerWeights* next =
          layer + 1 < config.num_layers ? &weights.layers[layer + 1] : nullptr;
      Seam(next == nullptr ? nullptr : &next->hc_attn, next == nullptr ? nullptr : &next->attn_norm,
           false);
      Show(name + ".streams", Rows(x));
    }
    if (logit_rows.empty()) return;
    const int rows = static_cast<int>(logit_rows.size());
    backend.Head({.x = Rows(x),
                  .rows = logit_rows.data(),
                  .num_rows = rows,
                  .site = &weights.hc_head.site,
                  .norm = weights.norm.data(),
                  .weight = &weights.head,
                  .gathered = gathered,
                  .u = head_u,
                  .z = head_z,
                  .logits = logits,
                  .eps = config.hc_eps,
                  .numerics = options.numerics});
  }
};

Forward::Forward(const ModelConfig& config, const Weights& weights, ops::Backend& backend,
                 const ForwardOptions& options)
    : impl_(std::make_unique<Impl>(config, weights, backend, options)) {}

Forward::~Forward() = default;

void Forward::Run(const ops::StepView& step, const KvView& kv, std::span<const int32_t> logit_rows,
                  const MatrixView& logits, Tap* tap) {
  FATHOM_CHECK(step.num_tokens > 0 && step.num_tokens <= impl_->options.max_tokens);
  FATHOM_CHECK(static_cast<int>(logit_rows.size()) <= impl_->options.max_logit_rows);
  impl_->step = &step;
  impl_->tokens = step.num_tokens;
  impl_->tap = tap;
  impl_->branches = tap == nullptr && step.num_tokens <= impl_->options.branch_tokens;
  impl_->Run(kv, logit_rows, logits);
}

int64_t Forward::WorkspaceBytes(const ModelConfig& config, const ForwardOptions& options,
                                DType activation) {
  return Buffers().LayOut(config, options, activation, nullptr);
}

int64_t Forward::workspace_bytes() const {
  return impl_->workspace_bytes;
}

}  // namespace fathom
