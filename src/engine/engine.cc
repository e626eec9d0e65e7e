#include "engine/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "core/log.h"
#include "engine/cache_mover.h"
#include "engine/retained_sessions.h"
#include "engine/scheduler.h"
#include "engine/validate.h"
#include "ops/numerics.h"

namespace fathom {
namespace {

// How often an engine that waits for its disk looks again.
constexpr std::chrono::milliseconds kDiskPace{2};

// Clients make up the names of sessions; a table of so many takes less than 100 MB.
constexpr size_t kMaxSessions = 65'536;

// Tokens after which every layer's window is exact again (PrefixOptions::rebuild).
int64_t RebuildTokens(const Geometry& geometry) {
  const auto layers = static_cast<int64_t>(geometry.of(CacheKind::kWindowKv).layers.size());
  return geometry.blocks_for(ops::kWindow * layers) * geometry.options.block_tokens;
}

double Seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// Outputs of one step, grouped by queue in the order they arise.
class Mail {
 public:
  void Add(const std::shared_ptr<OutputQueue>& queue, Output output) {
    if (queue == nullptr) return;
    const auto at = std::find_if(letters_.begin(), letters_.end(),
                                 [&](const auto& letter) { return letter.first == queue; });
    if (at != letters_.end()) at->second.push_back(std::move(output));
    else letters_.emplace_back(queue, std::vector<Output>()).second.push_back(std::move(output));
  }
  void Deliver() {
    for (auto& [queue, outputs] : letters_) queue->Deliver(std::move(outputs));
    letters_.clear();
  }

 private:
  // One entry per io thread: a handful, so a search beats a map.
  std::vector<std::pair<std::shared_ptr<OutputQueue>, std::vector<Output>>> letters_;
};

}  // namespace

struct Engine::Impl {
  // Set up by Start, then read only.
  EngineOptions options;
  Geometry geometry;
  Reservation block_memory, slot_memory, bundle_memory, host_block_memory, host_bundle_memory;
  BlockPool blocks;
  SlotPool slots;
  BundlePool bundles;
  std::optional<HostTier> host;
  std::unique_ptr<Executor> executor;
  Clock::time_point start = Clock::now();
  int64_t vocab_size = 0;

  // The engine thread's own.
  std::vector<CacheOp> ops;  // movements for before the next step
  std::optional<PrefixCache> cache;
  std::optional<CacheMover> mover;
  std::optional<DiskTier> disk;
  bool stalled = false;  // what waits cannot run before a transfer has ended
  std::unique_ptr<Scheduler> scheduler;
  RetainedSessions retained{kMaxSessions};
  std::unordered_map<RequestId, std::unique_ptr<Sequence>> sequences;
  StepPlan plan;
  // What a step's rows of logits have given, in their order.
  struct Next {
    bool prompt = false;                      // log-probabilities of a prompt token alone
    ops::SampledToken sampled;                // else: what follows the sequence
    std::vector<ops::TokenLogprob> logprobs;  // where asked for
  };
  std::vector<Next> next_tokens;
  Mail mail;
  int64_t ended = 0;   // sequences whose last output is in `mail`
  EngineStats totals;  // copied to `published` at the end of a step

  // Shared, under `mutex`. Never held while a step runs or outputs are delivered.
  mutable std::mutex mutex;
  std::condition_variable wake;  // arrivals, cancellations, stop
  std::condition_variable idle;  // live became 0
  std::deque<std::unique_ptr<Sequence>> arrivals;
  std::vector<RequestId> cancelled;
  bool reset_cache = false;
  bool disk_news = false;
  bool draining = false;
  bool stopping = false;
  uint64_t next_id = 1;
  int64_t live = 0;                  // submitted and not yet told how they ended
  EngineStats published;             // as of the last step; `waiting` without arrivals
  Clock::time_point oldest_waiting;  // with published.waiting > 0
  Clock::time_point last_activity;   // end of the last step, or when work appeared

  std::thread thread;

  Impl(const EngineOptions& o, const Geometry& g, Reservation block_bytes, Reservation slot_bytes,
       Reservation bundle_bytes, Reservation host_block_bytes, Reservation host_bundle_bytes)
      : options(o),
        geometry(g),
        block_memory(std::move(block_bytes)),
        slot_memory(std::move(slot_bytes)),
        bundle_memory(std::move(bundle_bytes)),
        host_block_memory(std::move(host_block_bytes)),
        host_bundle_memory(std::move(host_bundle_bytes)),
        blocks(block_memory.data(), g.block_bytes, o.num_blocks),
        slots(slot_memory.data(), g.slot_bytes, o.max_num_seqs),
        bundles(bundle_memory.data(), WindowKinds(g).max_bundle_bytes(),
                o.prefix_caching ? o.num_bundles : 0) {
    if (!o.prefix_caching) return;
    if (o.host_blocks > 0) {
      host.emplace(HostTier{{host_block_memory.data(), g.block_bytes, o.host_blocks},
                            {host_bundle_memory.data(), bundles.unit_bytes(), o.host_bundles}});
    }
    cache.emplace(PrefixOptions{.block_tokens = g.options.block_tokens,
                                .hash = o.prefix_hash,
                                .bundle_interval = o.bundle_interval,
                                .rebuild = RebuildTokens(g),
                                .keep_every = o.disk != nullptr ? o.disk_windows.every : 0,
                                .events = o.events != nullptr},
                  blocks, bundles, host ? &*host : nullptr, &ops);
  }

  double Now() const { return Seconds(Clock::now() - start); }

  void Run();
  bool Take();
  void CancelAll();
  void Step();
  void SampleRows();
  void FinishChunk(const Chunk& chunk);
  void TakeNext(Sequence& sequence, Next next, Output& output);
  Output NewOutput(const Sequence& sequence) const;
  void End(Sequence& sequence, Output output);
  void Publish(std::optional<Clock::duration> step);
  void CountAdmission(const Sequence& sequence);
  std::shared_ptr<const RequestReport> Report(const Sequence& sequence) const;
  void RunOps();
};

// --- any thread ---

Expected<std::unique_ptr<Engine>> Engine::Start(const EngineOptions& asked,
                                                const Geometry& geometry,
                                                const ExecutorFactory& make_executor,
                                                const MemorySource& memory,
                                                const MemorySource& host_memory) {
  FATHOM_ASSIGN(const EngineOptions options, CompleteOptions(asked, geometry));
  const int64_t bundle_bytes = WindowKinds(geometry).max_bundle_bytes();
  const int64_t reuse = options.prefix_caching ? 1 : 0;
  FATHOM_ASSIGN(Reservation block_memory, memory(options.num_blocks * geometry.block_bytes,
                                                 fmt::format("{} KV blocks", options.num_blocks)));
  FATHOM_ASSIGN(Reservation slot_memory,
                memory(options.max_num_seqs * geometry.slot_bytes,
                       fmt::format("{} sequence slots", options.max_num_seqs)));
  FATHOM_ASSIGN(Reservation bundle_memory, memory(reuse * options.num_bundles * bundle_bytes,
                                                  fmt::format("{} bundles", options.num_bundles)));
  FATHOM_ASSIGN(Reservation host_block_memory,
                host_memory(reuse * options.host_blocks * geometry.block_bytes,
                            fmt::format("{} blocks of the host tier", options.host_blocks)));
  FATHOM_ASSIGN(Reservation host_bundle_memory,
                host_memory(reuse * options.host_bundles * bundle_bytes,
                            fmt::format("{} bundles of the host tier", options.host_bundles)));
  auto impl = std::make_unique<Impl>(options, geometry, std::move(block_memory),
                                     std::move(slot_memory), std::move(bundle_memory),
                                     std::move(host_block_memory), std::move(host_bundle_memory));
  FATHOM_ASSIGN(impl->executor, make_executor(impl->blocks, impl->slots));
  impl->vocab_size = impl->executor->vocab_size();
  if (options.eos_token < 0 || options.eos_token >= impl->vocab_size) {
    return FailParam(Code::kInvalidArgument, "eos_token",
                     "end token {} is outside the vocabulary of {}", options.eos_token,
                     impl->vocab_size);
  }
  const ExecutorLimits limits = impl->executor->limits();
  impl->options.max_num_batched_tokens =
      std::min(options.max_num_batched_tokens, limits.max_step_tokens);
  if (impl->cache && options.disk != nullptr) {
    impl->disk.emplace(*options.disk, *impl->cache, impl->blocks, impl->bundles,
                       options.disk_windows, &impl->ops);
    options.disk->SetWake([raw = impl.get()] {
      {
        const std::lock_guard lock(raw->mutex);
        raw->disk_news = true;
      }
      raw->wake.notify_one();
    });
  }
  impl->scheduler = std::make_unique<Scheduler>(
      SchedulerOptions{.max_step_tokens = impl->options.max_num_batched_tokens,
                       .max_logit_rows = limits.max_logit_rows,
                       .max_prefill_with_decode = options.max_prefill_with_decode,
                       .block_tokens = geometry.options.block_tokens},
      impl->blocks, impl->slots, &impl->ops, impl->cache ? &*impl->cache : nullptr,
      impl->disk ? &*impl->disk : nullptr);
  impl->mover.emplace(geometry, impl->blocks, impl->slots, impl->bundles,
                      impl->host ? &*impl->host : nullptr, *impl->executor);
  impl->Publish(std::nullopt);
  impl->thread = std::thread([raw = impl.get()] { raw->Run(); });
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Engine::~Engine() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->wake.notify_one();
  impl_->thread.join();
  if (impl_->disk) impl_->options.disk->SetWake(nullptr);
}

Expected<RequestId> Engine::Submit(Request request) {
  std::vector<Request> one;
  one.push_back(std::move(request));
  FATHOM_ASSIGN(const std::vector<RequestId> ids, SubmitAll(std::move(one)));
  return ids.front();
}

Expected<std::vector<RequestId>> Engine::SubmitAll(std::vector<Request> requests) {
  Impl& impl = *impl_;
  const auto count = static_cast<int64_t>(requests.size());
  const int64_t capacity = impl.options.max_waiting;
  if (count > capacity) {
    return FailParam(Code::kInvalidArgument, "n",
                     "{} sequences at once are more than the {} the queue holds", count, capacity);
  }
  const Clock::time_point now = Clock::now();
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (Request& request : requests) {
    FATHOM_ASSIGN(const int64_t limit,
                  CheckRequest(request, impl.options, impl.geometry, impl.vocab_size));
    sequences.push_back(std::make_unique<Sequence>(RequestId{}, std::move(request), limit, now));
    sequences.back()->arrived_at = Seconds(now - impl.start);
  }
  std::vector<RequestId> ids;
  ids.reserve(sequences.size());
  {
    const std::lock_guard lock(impl.mutex);
    if (impl.draining || impl.stopping) {
      return Fail(Code::kUnavailable, "the server is draining and takes no new requests");
    }
    const auto waiting = impl.published.waiting + static_cast<int64_t>(impl.arrivals.size());
    if (waiting + count > capacity) {
      return Fail(Code::kResourceExhausted,
                  "{} requests are waiting and the queue holds {}{}; try again later", waiting,
                  capacity, count > 1 ? fmt::format(", too few places for {} more", count) : "");
    }
    for (auto& sequence : sequences) {
      sequence->id = RequestId{impl.next_id++};
      ids.push_back(sequence->id);
      impl.arrivals.push_back(std::move(sequence));
      if (impl.live++ == 0) impl.last_activity = now;
    }
  }
  impl.wake.notify_one();
  return ids;
}

void Engine::Cancel(RequestId id) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->cancelled.push_back(id);
  }
  impl_->wake.notify_one();
}

void Engine::ResetPrefixCache() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->reset_cache = true;
  }
  impl_->wake.notify_one();
}

void Engine::BeginDrain() {
  const std::lock_guard lock(impl_->mutex);
  impl_->draining = true;
}

bool Engine::WaitIdle(std::chrono::milliseconds limit) {
  std::unique_lock lock(impl_->mutex);
  return impl_->idle.wait_for(lock, limit, [&] { return impl_->live == 0; });
}

EngineStats Engine::stats() const {
  const Clock::time_point now = Clock::now();
  const std::lock_guard lock(impl_->mutex);
  EngineStats stats = impl_->published;
  Clock::time_point oldest = stats.waiting > 0 ? impl_->oldest_waiting : now;
  if (!impl_->arrivals.empty()) oldest = std::min(oldest, impl_->arrivals.front()->arrival);
  stats.waiting += static_cast<int>(impl_->arrivals.size());
  stats.oldest_waiting_seconds = std::max(0.0, Seconds(now - oldest));
  if (impl_->live > 0) {
    stats.seconds_since_step = std::max(0.0, Seconds(now - impl_->last_activity));
  }
  return stats;
}

const EngineOptions& Engine::options() const {
  return impl_->options;
}
const Geometry& Engine::geometry() const {
  return impl_->geometry;
}

// --- the engine thread ---

void Engine::Impl::Run() {
  while (Take()) {
    if (scheduler->Plan(plan, Now())) {
      Publish(std::nullopt);  // a step may be long: who runs and who waits shows from its start
      const Clock::time_point begin = Clock::now();
      Step();
      Publish(Clock::now() - begin);
      stalled = false;
    } else {
      stalled = !sequences.empty();
      FATHOM_CHECK(!stalled || disk);  // else nothing would ever change
      Publish(std::nullopt);
    }
    mail.Deliver();
    const std::lock_guard lock(mutex);
    live -= std::exchange(ended, 0);
    if (live == 0) idle.notify_all();
  }
  CancelAll();
  if (!disk) return;
  RunOps();
  if (!disk->Flush(*mover, Now(), Clock::now() + options.disk_flush)) {
    Log().warn("disk tier: not everything was written within {} s", options.disk_flush.count());
  }
}

// Waits for something to do, then takes arrivals and cancellations. False to stop.
bool Engine::Impl::Take() {
  std::unique_lock lock(mutex);
  const bool runs = !sequences.empty() && !stalled;
  const auto ready = [&] {
    return stopping || reset_cache || disk_news || runs || !arrivals.empty() || !cancelled.empty();
  };
  if (disk && (stalled || disk->writing())) wake.wait_for(lock, kDiskPace, ready);
  else wake.wait(lock, ready);
  if (stopping) return false;
  disk_news = false;
  const bool reset = std::exchange(reset_cache, false);
  published.waiting += static_cast<int>(arrivals.size());
  if (!arrivals.empty() && published.waiting == static_cast<int>(arrivals.size())) {
    oldest_waiting = arrivals.front()->arrival;
  }
  std::deque<std::unique_ptr<Sequence>> arrived = std::exchange(arrivals, {});
  const std::vector<RequestId> leaving = std::exchange(cancelled, {});
  lock.unlock();

  if (reset && cache) {
    cache->Clear(Now());
    retained.Clear();
  }
  if (disk) {
    RunOps();  // what is to be written must be in its place
    disk->Work(*mover, Now());
  }
  for (auto& sequence : arrived) {
    scheduler->Add(sequence.get());
    const RequestId id = sequence->id;
    sequences.emplace(id, std::move(sequence));
  }
  for (const RequestId id : leaving) {
    const auto at = sequences.find(id);
    if (at == sequences.end()) continue;
    Output output = NewOutput(*at->second);
    output.finish = FinishReason::kCancelled;
    End(*at->second, std::move(output));
  }
  return true;
}

void Engine::Impl::CancelAll() {
  {
    const std::lock_guard lock(mutex);
    for (auto& sequence : arrivals) {
      scheduler->Add(sequence.get());
      const RequestId id = sequence->id;
      sequences.emplace(id, std::move(sequence));
    }
    arrivals.clear();
  }
  while (!sequences.empty()) {
    Sequence& sequence = *sequences.begin()->second;
    Output output = NewOutput(sequence);
    output.finish = FinishReason::kCancelled;
    End(sequence, std::move(output));
  }
  Publish(std::nullopt);
  mail.Deliver();
}

void Engine::Impl::Step() {
  for (Sequence* sequence : scheduler->admitted()) {
    if (!std::exchange(sequence->counted, true)) CountAdmission(*sequence);
  }
  RunOps();
  const Status run = executor->Execute(plan);
  if (run) {
    SampleRows();
    for (const Chunk& chunk : scheduler->chunks()) FinishChunk(chunk);
    return;
  }
  Log().error("step of {} tokens failed: {}", plan.num_tokens(), run.error().message);
  for (const Chunk& chunk : scheduler->chunks()) {
    Output output = NewOutput(*chunk.sequence);
    output.finish = FinishReason::kError;
    output.error = run.error();
    End(*chunk.sequence, std::move(output));
  }
}

// Log-probabilities are those of the model's own logits, before bias, penalties and bans (vLLM's
// raw_logprobs): rows of which some are wanted are read before anything is sampled.
void Engine::Impl::SampleRows() {
  next_tokens.assign(plan.logit_rows.size(), {});
  std::vector<ops::SamplingRow> rows;
  std::vector<std::vector<float>> untouched;  // of rows[i], where its request wants some
  const auto read = [this](int64_t row) {
    std::vector<float> logits(static_cast<size_t>(vocab_size));
    executor->CopyLogits(row, logits);
    return logits;
  };
  std::vector<const Sequence*> owners;
  for (const Chunk& chunk : scheduler->chunks()) {
    Sequence& sequence = *chunk.sequence;
    const Request& request = sequence.request;
    for (int64_t row = chunk.first_row; row < chunk.first_row + chunk.rows; ++row) {
      const int64_t position = plan.position[plan.logit_rows[row]];
      if (sequence.wants_prompt_logprob(position)) {
        next_tokens[row] = {
            true,
            {},
            ops::Logprobs(read(row), sequence.tokens[position + 1], request.prompt_logprobs)};
        continue;
      }
      rows.push_back(sequence.sampler.Next(request, sequence.tokens, sequence.prompt_tokens,
                                           options.eos_token, static_cast<int32_t>(row)));
      owners.push_back(&sequence);
      untouched.push_back(request.logprobs >= 0 ? read(row) : std::vector<float>());
    }
  }
  if (rows.empty()) return;
  std::vector<ops::SampledToken> sampled(rows.size());
  executor->Sample(rows, sampled);
  for (size_t i = 0; i < rows.size(); ++i) {
    Next& next = next_tokens[rows[i].row];
    next.sampled = sampled[i];
    if (untouched[i].empty()) continue;
    next.logprobs = ops::Logprobs(untouched[i], sampled[i].token, owners[i]->request.logprobs);
  }
}

void Engine::Impl::RunOps() {
  mover->Run(ops);
  ops.clear();
}

void Engine::Impl::CountAdmission(const Sequence& sequence) {
  const PrefixReport& report = sequence.prefix;
  ++totals.misses[static_cast<size_t>(report.reason)];
  if (report.reason != MissReason::kDisabled) {
    totals.prefix_queries += static_cast<uint64_t>(sequence.prompt_tokens);
  }
  totals.prompt_tokens += static_cast<uint64_t>(report.boundary);
  totals.prompt_from_device += static_cast<uint64_t>(report.device_tokens);
  totals.prompt_from_host += static_cast<uint64_t>(report.host_tokens);
  totals.prompt_from_disk += static_cast<uint64_t>(report.disk_tokens);
}

void Engine::Impl::FinishChunk(const Chunk& chunk) {
  Sequence& sequence = *chunk.sequence;
  scheduler->Advance(chunk);
  const int64_t prefilled = std::min(sequence.computed, sequence.prompt_tokens);
  const bool progressed = prefilled > sequence.furthest_prefill;
  if (progressed) {
    totals.prompt_tokens += static_cast<uint64_t>(prefilled - sequence.furthest_prefill);
    totals.prompt_computed += static_cast<uint64_t>(prefilled - sequence.furthest_prefill);
    sequence.furthest_prefill = prefilled;
  }

  Output output = NewOutput(sequence);
  for (int64_t row = chunk.first_row; row < chunk.first_row + chunk.rows; ++row) {
    Next& next = next_tokens[row];
    if (next.prompt) {
      output.prompt_logprobs.push_back(std::move(next.logprobs));
      ++sequence.prompt_logprobs_done;
    } else {
      TakeNext(sequence, std::move(next), output);
    }
  }

  if (output.finish) {
    End(sequence, std::move(output));
  } else if (!output.tokens.empty() || !output.prompt_logprobs.empty() ||
             (progressed && sequence.request.progress)) {
    mail.Add(sequence.request.queue, std::move(output));
  }
}

// Adds the next token and decides whether the sequence goes on.
void Engine::Impl::TakeNext(Sequence& sequence, Next next, Output& output) {
  const Request& request = sequence.request;
  const TokenId token = next.sampled.token;
  if (!std::isfinite(next.sampled.logit)) {
    // One row comes from one hidden state, so a NaN there shows in every logit.
    output.finish = FinishReason::kError;
    output.error = {Code::kInternal,
                    fmt::format("the logits after {} tokens are not finite", sequence.length()),
                    {}};
    return;
  }
  ++totals.generation_tokens;
  if (sequence.first_token_at < 0) sequence.first_token_at = Now();
  const bool ends = (!request.ignore_eos && token == options.eos_token) ||
                    std::find(request.stop_tokens.begin(), request.stop_tokens.end(), token) !=
                        request.stop_tokens.end();
  if (ends) {
    output.finish = FinishReason::kStop;
    output.stop_token = token;
    return;
  }
  sequence.tokens.push_back(token);
  output.tokens.push_back(token);
  if (request.logprobs >= 0) output.logprobs.push_back(std::move(next.logprobs));
  if (sequence.length() >= sequence.limit) output.finish = FinishReason::kLength;
}

Output Engine::Impl::NewOutput(const Sequence& sequence) const {
  Output output;
  output.id = sequence.id;
  output.prefilled = sequence.furthest_prefill;
  output.prompt_tokens = sequence.prompt_tokens;
  output.cached_tokens = sequence.prefix.boundary;
  return output;
}

std::shared_ptr<const RequestReport> Engine::Impl::Report(const Sequence& sequence) const {
  auto report = std::make_shared<RequestReport>();
  report->prefix = sequence.prefix;
  report->prefix.prompt_tokens = sequence.prompt_tokens;
  const double now = Now();
  const double admitted = sequence.admitted_at < 0 ? now : sequence.admitted_at;
  const double first = sequence.first_token_at < 0 ? now : sequence.first_token_at;
  report->queue_seconds = admitted - sequence.arrived_at;
  report->prefill_seconds = std::max(0.0, first - admitted);
  report->decode_seconds = std::max(0.0, now - first);
  report->preemptions = sequence.preemptions;
  report->recomputed_tokens = sequence.recomputed;
  for (const KindGeometry& kind : geometry.kinds) {
    const auto layers = static_cast<int64_t>(kind.layers.size());
    const int64_t rows =
        kind.block_kind ? sequence.computed / kind.tokens_per_row : int64_t{kind.rows_per_page};
    report->bytes[static_cast<size_t>(kind.kind)] = layers * rows * kind.row_bytes;
  }
  return report;
}

// Sends the last output and forgets the sequence.
void Engine::Impl::End(Sequence& sequence, Output output) {
  switch (*output.finish) {
    case FinishReason::kStop: ++totals.finished_stop; break;
    case FinishReason::kLength: ++totals.finished_length; break;
    case FinishReason::kCancelled: ++totals.finished_cancelled; break;
    case FinishReason::kError: ++totals.finished_error; break;
  }
  ++ended;
  output.report = Report(sequence);
  totals.recomputed_tokens += static_cast<uint64_t>(sequence.recomputed);
  // One that was never computed has left nothing to come back to.
  if (cache && sequence.computed > 0 && !sequence.request.session.empty() &&
      sequence.request.retain_seconds > 0) {
    retained.Retain(sequence.request.session, Now() + sequence.request.retain_seconds);
  }
  // What an error left in the slot is not to be trusted.
  const bool save = *output.finish != FinishReason::kError;
  mail.Add(sequence.request.queue, std::move(output));
  scheduler->Remove(&sequence, save);
  sequences.erase(sequence.id);
}

// Makes the counters visible to stats() in one piece.
void Engine::Impl::Publish(std::optional<Clock::duration> step) {
  const Clock::time_point now = Clock::now();
  totals.running = static_cast<int>(scheduler->running().size());
  totals.waiting = static_cast<int>(scheduler->waiting().size());
  totals.blocks_total = blocks.capacity();
  totals.blocks_used = blocks.used_count() - blocks.evictable_count();
  totals.blocks_cached = blocks.evictable_count();
  totals.bundles_total = bundles.capacity();
  if (host) {
    totals.host_blocks_total = host->blocks.capacity();
    totals.host_bundles_total = host->bundles.capacity();
  }
  if (cache) {
    totals.prefix = cache->stats();
    if (disk) totals.disk = disk->stats();
    retained.Expire(Now());
    totals.sessions_retained = static_cast<int64_t>(retained.size());
    if (options.events != nullptr) {
      std::vector<CacheEvent> events = cache->TakeEvents();
      if (!events.empty()) options.events->Publish(std::move(events));
    }
  }
  totals.slots_total = slots.capacity();
  totals.slots_used = slots.used_count();
  totals.preemptions = scheduler->preemptions();
  if (step) {
    ++totals.steps;
    totals.last_step_seconds = Seconds(*step);
  }
  Clock::time_point oldest = now;
  for (const Sequence* sequence : scheduler->waiting())
    oldest = std::min(oldest, sequence->arrival);
  const std::lock_guard lock(mutex);
  published = totals;
  oldest_waiting = oldest;
  if (step) last_activity = now;
}

}  // namespace fathom
