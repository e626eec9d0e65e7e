// `fathom serve`: the flags of the server.
#include <fmt/format.h>

#include <memory>

#include "cli/cache_flags.h"
#include "cli/commands.h"
#include "cli/compilation_config.h"
#include "cli/model_flags.h"
#include "cli/serve.h"

namespace fathom {
namespace {

struct ServeFlags {
  ModelFlags model;
  ServeOptions options;
  std::string compilation_config;
  bool enforce_eager = false;
  bool print_config = false;
};

void AddGraphFlags(Command& command, ServeFlags& flags) {
  command.Switch("--enforce-eager", flags.enforce_eager,
                 "on a GPU: launch every step kernel by kernel, capture no graphs");
  command.Text("--compilation-config", flags.compilation_config, "JSON",
               R"(which decoding steps a GPU captures: {"cudagraph_mode": "NONE"}, )"
               R"({"max_cudagraph_capture_size": 16})");
}

// Graphs to capture, and what is to be said of flags that change nothing.
Status ReadGraphFlags(const Command& command, const ServeFlags& flags, ServeOptions* options) {
  const bool gpu = RunsOnGpu(options->runtime.device);
  for (const char* flag : {"--enforce-eager", "--compilation-config"}) {
    if (gpu || command.origin(flag) == Origin::kDefault) continue;
    options->notices.push_back(
        fmt::format("{} has no effect: there are no graphs to capture on a CPU", flag));
  }
  if (!flags.compilation_config.empty()) {
    FATHOM_ASSIGN(const CompilationConfig config, ParseCompilationConfig(flags.compilation_config));
    options->runtime.graph_sequences = config.graph_sequences;
    for (const std::string& key : config.ignored) {
      options->notices.push_back(fmt::format("--compilation-config: {} has no effect", key));
    }
  }
  if (flags.enforce_eager) options->runtime.graph_sequences = 0;
  return {};
}

void AddServerFlags(Command& command, ServeOptions& options) {
  command.List("--served-model-name", options.served_model_names, "NAME",
               "name in requests, may be repeated; left out: MODEL as given");
  command.Text("--host", options.host, "ADDRESS", "where to listen");
  command.Count("--port", options.port, 0, 65535, "0: any free one, shown in the ready line");
  command.List("--api-key", options.api_keys, "KEY",
               "key clients must send, may be repeated; left out: open");
  command.Secret("--api-key");
  command.List("--allowed-origins", options.allowed_origins, "ORIGIN",
               "CORS, may be repeated; * allows all");
  command.Text("--default-chat-template-kwargs", options.default_chat_template_kwargs, "JSON",
               R"({"thinking": true} makes conversations think by default)");
  command.Choice("--thinking-sampling", options.thinking_sampling, {"apply", "ignore"},
                 "whether temperature and penalties count while thinking");
  command.Text("--metrics-prefix", options.metrics_prefix, "TEXT", "of the names in /metrics");
  command.Text("--kv-events-config", options.kv_events_config, "JSON",
               "publish what the prefix cache holds over ZeroMQ (docs/kv-events.md)");
  command.Count("--http-threads", options.http_threads, 1, 256, "threads that serve sockets");
  command.Count("--max-body-size", options.max_body_bytes, 1, int64_t{1} << 40,
                "bytes of a request, beyond them 413");
  command.Real("--heartbeat-seconds", options.heartbeat_seconds, 0.001, 3600,
               "between comments in a silent stream");
  command.Real("--unhealthy-seconds", options.unhealthy_seconds, 0.001, 1e6,
               "without a step while work waits: /health answers 503");
  command.Real("--stall-seconds", options.stall_seconds, 0.001, 1e6,
               "without a step while work waits: requests fail");
}

// Flags of other engines that change nothing here. What they would ask for and Fathom does not have
// is not among them: such flags are unknown.
void AddFlagsWithoutEffect(Command& command) {
  command.NoEffect("--enable-chunked-prefill", true, "prompts are always prefilled in chunks");
  command.NoEffect("--tokenizer-mode", false, "the tokenizer follows from tokenizer.json");
  command.NoEffect("--reasoning-parser", false, "reasoning is always told apart");
  const char* parallel = "no multi-device parallelism yet";
  command.NoEffect("--tensor-parallel-size", false, parallel, {"1"});
  command.NoEffect("--dtype", false, "activations are what the numerics say", {"auto", "bfloat16"});
  command.NoEffect("--generation-config", false, "it is read from the model's directory", {"auto"});
  command.NoEffect("--revision", false, "a model is taken as it lies on disk");
  command.NoEffect("--uvicorn-log-level", false, "--log-level sets what goes to the log");
  command.NoEffect("--disable-log-stats", true, "statistics are in /metrics, not in the log");
  command.NoEffect("--enable-log-requests", true, "--log-level sets what goes to the log");
  command.NoEffect("--disable-log-requests", true, "--log-level sets what goes to the log");
  command.NoEffect("--enable-prompt-tokens-details", true, "usage is always reported whole");
  command.NoEffect("--trust-remote-code", true, "no code is ever loaded from a checkpoint");
}

Status Serve(const ServeFlags& flags, const Command& command) {
  ServeOptions options = flags.options;
  FATHOM_ASSIGN(options.runtime, FinishModelFlags(command, flags.model));
  if (flags.print_config) {
    fmt::print("{}", command.PrintConfig());
    return {};
  }
  options.notices = command.Notices();
  FATHOM_TRY(ReadGraphFlags(command, flags, &options));
  if (options.runtime.model.empty()) {
    options.notices.emplace_back("no MODEL given: serving the demo");
  }
  return RunServe(options);
}

}  // namespace

void AddServeCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<ServeFlags>();
  flags->model.log_level = "info";
  auto command =
      Command::Add(app, "serve", "The server: OpenAI's HTTP API",
                   "  fathom serve                                the demo model on port 8000\n"
                   "  fathom serve deepseek-ai/DeepSeek-V4-Flash --max-model-len 128K --port 9000\n"
                   "  FATHOM_API_KEY=secret fathom serve --config server.yaml\n"
                   "  fathom serve --config server.yaml --print-config");
  AddModelFlags(*command, flags->model, ModelArgument::kPositional);
  AddCacheFlags(*command, flags->model.options.reuse);
  AddServerFlags(*command, flags->options);
  command->Count("--max-waiting", flags->model.options.max_waiting, 1, 1 << 24,
                 "requests in the queue, beyond them 429");
  AddGraphFlags(*command, *flags);
  AddFlagsWithoutEffect(*command);
  command->Switch("--print-config", flags->print_config,
                  "print every setting with its origin, and end");
  command->OnRun(exit_code, [flags](Command& self) {
    const Status status = Serve(*flags, self);
    return status ? 0 : ReportError(status.error());
  });
}

}  // namespace fathom
