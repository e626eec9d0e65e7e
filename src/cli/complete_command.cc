// `fathom complete`: one prompt, one answer, no server.
#include <fmt/format.h>

#include <csignal>
#include <memory>
#include <vector>

#include "cli/commands.h"
#include "cli/generate.h"
#include "cli/input.h"
#include "cli/progress_bar.h"
#include "cli/sampling_flags.h"
#include "core/stderr_print.h"

namespace fathom {
namespace {

struct CompleteOptions {
  ModelFlags model;
  SamplingFlags sampling;
  std::string prompt;
  std::string system;
  std::vector<std::string> files;
  bool raw = false;
  bool stats = false;
};

// Files, then the prompt, an empty line between them.
Expected<std::string> PromptText(const CompleteOptions& options) {
  std::string text;
  for (const std::string& path : options.files) {
    FATHOM_ASSIGN(const std::string document, ReadDocument(path));
    text += document;
  }
  if (!options.prompt.empty()) return text + options.prompt;
  FATHOM_ASSIGN(std::string typed, ReadStandardInput());
  if (typed.ends_with('\n')) typed.pop_back();
  if (typed.empty() && text.empty()) {
    return Fail(Code::kInvalidArgument,
                "complete: no prompt, neither as argument nor on standard "
                "input");
  }
  return text + typed;
}

Expected<std::vector<TokenId>> EncodePrompt(const Runtime& runtime, const CompleteOptions& options,
                                            const std::string& text) {
  if (options.raw) {
    std::vector<TokenId> ids = runtime.tokenizer->Encode(text, AddedTokens::kInert);
    ids.insert(ids.begin(), runtime.encoder->bos());
    return ids;
  }
  std::vector<ChatMessage> messages;
  if (!options.system.empty()) {
    messages.push_back({.role = ChatMessage::Role::kSystem, .content = options.system});
  }
  messages.push_back({.role = ChatMessage::Role::kUser, .content = text});
  return runtime.encoder->Encode(messages, {.thinking = options.sampling.thinking});
}

Status RunComplete(const CompleteOptions& options, Command& command) {
  FATHOM_ASSIGN(const RuntimeOptions runtime_options, FinishModelFlags(command, options.model));
  FATHOM_ASSIGN(const std::string text, PromptText(options));
  FATHOM_ASSIGN(const std::unique_ptr<Runtime> runtime, LoadRuntime(runtime_options));
  FATHOM_ASSIGN(std::vector<TokenId> prompt, EncodePrompt(*runtime, options, text));

  GenerateOptions generate =
      MakeGenerateOptions(command, options.sampling, options.model, runtime->defaults);
  generate.plain_text = options.raw;
  ProgressBar bar("reading");
  const InterruptScope interrupt;
  bool ends_line = true, wrote = false;
  FATHOM_ASSIGN(
      const GenerateStats stats,
      RunGeneration(*runtime, std::move(prompt), generate,
                    {.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); },
                     .text =
                         [&](const OutputDelta& delta) {
                           bar.Clear();
                           PrintStderr("{}", delta.reasoning);
                           fmt::print("{}", delta.content);
                           std::fflush(stdout);
                           wrote = wrote || !delta.content.empty();
                           if (!delta.content.empty()) ends_line = delta.content.back() == '\n';
                         }}));
  bar.Clear();
  if (!ends_line) fmt::print("\n");
  std::fflush(stdout);
  if (options.stats) PrintStderr("{}\n", stats.Describe());
  if (stats.finish == FinishReason::kCancelled) {
    // After an answer cut off its line has ended above; otherwise the terminal shows "^C" there.
    if (!wrote) PrintStderr("\n");
    return Fail(Code::kCancelled, "interrupted");
  }
  return {};
}

}  // namespace

void AddCompleteCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<CompleteOptions>();
  auto command = Command::Add(
      app, "complete", "One answer to one prompt, from an argument or standard input",
      "  fathom complete Hello\n"
      "  fathom complete --file manual.txt --stats 'What is the access code for the tower?'\n"
      "  fathom complete --model deepseek-ai/DeepSeek-V4-Flash --thinking < question.txt");
  command->Positional("prompt", options->prompt, "left out: read from standard input");
  command->List("--file", options->files, "FILE", "text put before the prompt; may be repeated");
  command->Text("--system", options->system, "TEXT", "system message");
  command->Switch("--raw", options->raw, "continue the text as it is, without chat encoding");
  command->Switch("--stats", options->stats,
                  "print time to first token and tokens per second on standard error");
  options->model.options.max_num_seqs = 1;
  AddSamplingFlags(*command, options->sampling);
  AddModelFlags(*command, options->model, ModelArgument::kFlag);
  command->OnRun(exit_code, [options](Command& self) {
    const Status status = RunComplete(*options, self);
    if (status) return 0;
    const int failed = ReportError(status.error());
    return status.error().code == Code::kCancelled ? 128 + SIGINT : failed;
  });
}

}  // namespace fathom
