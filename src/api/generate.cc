// g++ 12 takes the frame allocator of Asio's coroutines for a mismatched pair once it is inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif

#include "api/generate.h"

#include <algorithm>
#include <ctime>
#include <optional>
#include <random>
#include <vector>

#include "api/api_error.h"
#include "api/generation.h"
#include "api/reply_writer.h"
#include "api/short_routes.h"
#include "core/log.h"

namespace fathom {

namespace asio = boost::asio;

namespace {

double Seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

uint64_t RandomSeed() {
  thread_local std::mt19937_64 random(std::random_device{}() ^
                                      (uint64_t{std::random_device{}()} << 32));
  return random();
}

// The choices of one request in the engine. Destruction cancels what still runs.
class Branches : public OutputSink {
 public:
  Branches(ApiContext& api, std::shared_ptr<Bridge> bridge, Connection& connection,
           Generation& generation, Clock::time_point arrival)
      : api_(api),
        bridge_(std::move(bridge)),
        connection_(connection),
        generation_(generation),
        arrival_(arrival),
        times_(generation.choices().size()) {}
  Branches(const Branches&) = delete;

  ~Branches() override {
    for (size_t i = 0; i < ids_.size(); ++i) {
      bridge_->Remove(ids_[i]);
      const Choice& choice = generation_.choices()[i];
      const bool given_up = !choice.finished() || choice.finish == "error";
      if (given_up) api_.model.engine->Cancel(ids_[i]);
      api_.metrics.CountFinished(choice.finished() ? choice.finish : "abort");
      if (!given_up && choice.finish != "abort" && times_[i].first) {
        api_.metrics.ObserveDecode(Seconds(*times_[i].last - *times_[i].first),
                                   choice.completion_tokens);
      }
    }
    if (!ids_.empty()) {
      const Usage usage = generation_.usage();
      api_.metrics.ObserveSizes(usage.prompt, usage.completion);
      api_.metrics.ObserveEndToEnd(Seconds(Clock::now() - arrival_));
      LogEnd(usage);
      Explain(usage);
    }
  }

  // All choices or none.
  Status Submit() {
    std::vector<Request> requests = generation_.MakeRequests(RandomSeed());
    for (Request& request : requests) request.queue = bridge_;
    FATHOM_ASSIGN(ids_, api_.model.engine->SubmitAll(std::move(requests)));
    for (size_t i = 0; i < ids_.size(); ++i) bridge_->Add(ids_[i], this, i);
    return {};
  }

  void OnOutput(size_t choice, Output output) override {
    if (!output.tokens.empty()) {
      const Clock::time_point now = Clock::now();
      Times& times = times_[choice];
      if (times.last) {
        api_.metrics.ObserveInterToken(Seconds(now - *times.last));
      } else if (!first_token_) {
        first_token_ = now;
        api_.metrics.ObserveFirstToken(Seconds(now - arrival_));
      }
      if (!times.first) times.first = now;
      times.last = now;
    } else if (output.finish == FinishReason::kStop && times_[choice].first) {
      times_[choice].last = Clock::now();  // the end token is counted and not delivered
    }
    if (generation_.Accept(choice, std::move(output))) api_.model.engine->Cancel(ids_[choice]);
  }

  void OnBatchEnd() override {
    if (connection_.streaming() && !connection_.disconnected() &&
        generation_.pending_bytes() > api_.options.limits.stream_buffer_bytes) {
      Log().warn("request {}: {} bytes of events are waiting for a slow client, cancelled",
                 connection_.request_id(), generation_.pending_bytes());
      connection_.Abort();
    }
    connection_.Wake();
  }

 private:
  struct Times {
    std::optional<Clock::time_point> first, last;  // tokens of a choice
  };

  // Enters the request into the log of explanations when the last of its reports is there: the
  // engine gives those of cancelled choices at the end of its step.
  void Explain(const Usage& usage) {
    auto explanation = std::make_shared<Explanation>();
    explanation->id = generation_.id();
    explanation->request_id = connection_.request_id();
    explanation->model = generation_.plan().model;
    explanation->session = generation_.plan().params.session;
    explanation->created = generation_.created();
    explanation->prompt_tokens = usage.prompt;
    explanation->cached_tokens = usage.cached;
    explanation->completion_tokens = usage.completion;
    explanation->choices = generation_.explained();
    auto missing = std::make_shared<size_t>(0);
    for (size_t i = 0; i < ids_.size(); ++i) {
      const Choice& choice = generation_.choices()[i];
      if (choice.report != nullptr) continue;
      ++*missing;
      bridge_->AwaitLast(ids_[i], [&log = api_.explanations, explanation, missing, i](Output last) {
        explanation->choices[i].report = std::move(last.report);
        if (--*missing == 0) log.Add(*explanation);
      });
    }
    if (*missing == 0) api_.explanations.Add(*explanation);
  }

  // One line per request. Its rate is that of all choices together after the first token.
  void LogEnd(const Usage& usage) const {
    std::string finish;
    for (const Choice& choice : generation_.choices()) {
      const std::string& reason = choice.finished() ? choice.finish : "abort";
      if (finish.empty()) finish = reason;
      else if (finish != reason) finish = "mixed";
    }
    // A stream that has begun has said 200, whatever came after it.
    int status = 200;
    if (connection_.disconnected()) status = 499;
    else if (!connection_.streaming() && generation_.error() != nullptr) {
      status = ToApiError(*generation_.error()).status;
    }
    Clock::time_point last = arrival_;
    for (const Times& times : times_) last = std::max(last, times.last.value_or(last));
    const double seconds = first_token_ ? Seconds(last - *first_token_) : 0;
    const int64_t later = usage.completion - static_cast<int64_t>(times_.size());
    Log().info(
        "request {} {}: prompt {} tokens ({} cached), completion {}, first token {}, {}, finish "
        "{}, status {}",
        connection_.request_id(),
        generation_.plan().chat ? "/v1/chat/completions" : "/v1/completions", usage.prompt,
        usage.cached, usage.completion,
        first_token_ ? fmt::format("{:.3f} s", Seconds(*first_token_ - arrival_)) : "none",
        seconds > 0 && later > 0
            ? fmt::format("{:.1f} tokens/s", static_cast<double>(later) / seconds)
            : "no rate",
        finish, status);
  }

  ApiContext& api_;
  std::shared_ptr<Bridge> bridge_;
  Connection& connection_;
  Generation& generation_;
  Clock::time_point arrival_;
  std::vector<RequestId> ids_;
  std::vector<Times> times_;
  std::optional<Clock::time_point> first_token_;  // of any choice
};

// Fails the request when the engine has stood still for too long.
void CheckStall(const ApiContext& api, Generation& generation) {
  const EngineStats stats = api.model.engine->stats();
  const double limit = Seconds(api.options.stall_limit);
  if (stats.running + stats.waiting == 0 || stats.seconds_since_step < limit) return;
  generation.Abort(
      {Code::kUnavailable,
       fmt::format("the engine has finished no step for {:.0f} s", stats.seconds_since_step),
       {}});
}

asio::awaitable<void> Stream(ApiContext& api, Connection& connection, Generation& generation,
                             ReplyWriter& writer) {
  bool open = co_await connection.StartStream();
  Clock::time_point written = Clock::now();
  int64_t progress = -1;
  while (open) {
    std::string events;
    writer.AppendEvents(&events);
    const GenerationPlan& plan = generation.plan();
    if (plan.params.include_progress && events.empty() && generation.prefilled() > progress) {
      progress = generation.prefilled();
      writer.AppendProgress(&events);
    }
    if (const Error* error = generation.error()) {
      writer.AppendError(*error, &events);
      co_await connection.Write(std::move(events));
      co_return;
    }
    const bool last = generation.settled();
    if (last) writer.AppendEnd(&events);
    const Clock::time_point now = Clock::now();
    if (events.empty() && now - written >= api.options.heartbeat) events = ": heartbeat\n\n";
    if (!events.empty()) {
      written = now;
      open = co_await connection.Write(std::move(events));
    }
    if (last || !open) co_return;
    co_await connection.WaitUntil(written + api.options.heartbeat);
    if (connection.disconnected()) co_return;
    if (Clock::now() - written >= api.options.heartbeat) CheckStall(api, generation);
  }
}

asio::awaitable<void> Collect(ApiContext& api, Connection& connection, Generation& generation,
                              ReplyWriter& writer) {
  while (!generation.settled() && generation.error() == nullptr) {
    co_await connection.WaitUntil(Clock::now() + api.options.heartbeat);
    if (connection.disconnected()) co_return;
    CheckStall(api, generation);
  }
  HttpResponse response;
  if (generation.error() != nullptr) response = ErrorReply(*generation.error());
  else response.body = writer.Body();
  co_await connection.Send(std::move(response));
}

}  // namespace

asio::awaitable<void> Generate(ApiContext& api, std::shared_ptr<Bridge> bridge,
                               Connection& connection, std::string body, Dialect dialect) {
  const Clock::time_point arrival = Clock::now();
  connection.Watch();
  const bool chat = dialect == Dialect::kChat;
  auto prepare = [&model = api.model, chat, text = std::move(body)] {
    return chat ? PrepareChat(text, model) : PrepareCompletion(text, model);
  };
  Expected<GenerationPlan> plan = co_await api.OnTextPool(std::move(prepare));
  if (connection.disconnected()) co_return;
  if (!plan) {
    co_await connection.Send(ErrorReply(plan.error()));
    co_return;
  }
  Generation generation(std::move(*plan), api.model,
                        (chat ? "chatcmpl-" : "cmpl-") + connection.request_id(),
                        static_cast<int64_t>(std::time(nullptr)));
  const std::unique_ptr<ReplyWriter> writer =
      chat ? MakeChatWriter(generation) : MakeCompletionWriter(generation);
  Branches branches(api, std::move(bridge), connection, generation, arrival);
  if (const Status submitted = branches.Submit(); !submitted) {
    co_await connection.Send(ErrorReply(submitted.error()));
    co_return;
  }
  if (generation.plan().params.stream) {
    co_await Stream(api, connection, generation, *writer);
  } else {
    co_await Collect(api, connection, generation, *writer);
  }
}

}  // namespace fathom
