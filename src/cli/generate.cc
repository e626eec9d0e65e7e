#include "cli/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <mutex>

namespace fathom {
namespace {

volatile std::sig_atomic_t interrupt_flag = 0;

double Seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// Outputs from the engine thread to the one that waits here.
class BlockingQueue : public OutputQueue {
 public:
  void Deliver(std::vector<Output> outputs) override {
    const std::lock_guard lock(mutex_);
    for (Output& output : outputs) outputs_.push_back(std::move(output));
    ready_.notify_one();
  }

  // Nothing after `limit` without news.
  std::vector<Output> Take(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    ready_.wait_for(lock, limit, [this] { return !outputs_.empty(); });
    std::vector<Output> taken(std::make_move_iterator(outputs_.begin()),
                              std::make_move_iterator(outputs_.end()));
    outputs_.clear();
    return taken;
  }

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Output> outputs_;
};

std::string Grouped(int64_t number) {
  std::string digits = std::to_string(number);
  for (size_t i = digits.size(); i > 3;) digits.insert(i -= 3, ",");
  return digits;
}

}  // namespace

InterruptScope::InterruptScope() {
  interrupt_flag = 0;
  struct sigaction action = {};
  action.sa_handler = [](int) { interrupt_flag = 1; };
  action.sa_flags = 0;  // no SA_RESTART: a read from the terminal must end
  sigaction(SIGINT, &action, &previous_);
}

InterruptScope::~InterruptScope() {
  sigaction(SIGINT, &previous_, nullptr);
}

bool InterruptScope::interrupted() {
  return interrupt_flag != 0;
}

ops::SamplingParams DefaultSampling(const GenerationDefaults& defaults) {
  ops::SamplingParams params;
  params.temperature = defaults.temperature;
  params.top_p = defaults.top_p;
  params.top_k = defaults.top_k;
  params.min_p = defaults.min_p;
  params.repetition_penalty = defaults.repetition_penalty;
  return params;
}

Expected<GenerateStats> RunGeneration(Runtime& runtime, std::vector<TokenId> prompt,
                                      const GenerateOptions& options,
                                      const GenerateCallbacks& callbacks) {
  auto queue = std::make_shared<BlockingQueue>();
  Request request;
  request.prompt = std::move(prompt);
  request.sampling = options.sampling;
  request.max_tokens = options.max_tokens;
  request.stop_tokens = runtime.defaults.eos_tokens;
  request.progress = static_cast<bool>(callbacks.progress);
  request.queue = queue;

  OutputParser parser(*runtime.tokenizer, *runtime.encoder,
                      {.thinking = options.thinking, .plain_text = options.plain_text});
  const auto emit = [&callbacks](const OutputDelta& delta) {
    if (!delta.reasoning.empty() || !delta.content.empty()) callbacks.text(delta);
  };
  GenerateStats stats;
  const Clock::time_point start = Clock::now();
  FATHOM_ASSIGN(const RequestId id, runtime.engine->Submit(std::move(request)));
  bool cancelled = false;
  for (;;) {
    if (InterruptScope::interrupted() && !cancelled) {
      runtime.engine->Cancel(id);
      cancelled = true;
    }
    for (const Output& output : queue->Take(std::chrono::milliseconds(100))) {
      stats.prompt_tokens = output.prompt_tokens;
      stats.cached_tokens = output.cached_tokens;
      if (!output.tokens.empty() && stats.completion_tokens == 0) {
        stats.first_token_seconds = Seconds(Clock::now() - start);
      }
      if (callbacks.progress && stats.completion_tokens == 0) {
        callbacks.progress(output.prefilled, output.prompt_tokens);
      }
      for (TokenId token : output.tokens) emit(parser.Push(token));
      stats.completion_tokens += static_cast<int64_t>(output.tokens.size());
      if (!output.finish) continue;
      if (*output.finish == FinishReason::kError) return tl::unexpected<Error>(output.error);
      emit(parser.Finish());
      stats.finish = *output.finish;
      stats.total_seconds = Seconds(Clock::now() - start);
      return stats;
    }
  }
}

std::string GenerateStats::Describe() const {
  std::string text = Grouped(prompt_tokens) + " prompt tokens";
  if (cached_tokens > 0) text += fmt::format(" ({} cached)", Grouped(cached_tokens));
  if (completion_tokens == 0) return text + fmt::format(", no token in {:.2f} s", total_seconds);
  const double prefill =
      static_cast<double>(prompt_tokens - cached_tokens) / std::max(first_token_seconds, 1e-9);
  text += fmt::format(", first token after {:.2f} s ({} tok/s); {} tokens", first_token_seconds,
                      Grouped(static_cast<int64_t>(prefill)), Grouped(completion_tokens));
  const double decoding = total_seconds - first_token_seconds;
  if (completion_tokens > 1 && decoding > 0) {
    text += fmt::format(" at {:.1f} tok/s", static_cast<double>(completion_tokens - 1) / decoding);
  }
  return text;
}

}  // namespace fathom
