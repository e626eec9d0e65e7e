// `fathom chat`: a conversation in the terminal. Also works line by line on piped input.
#include <editline/readline.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <vector>

#include "cli/commands.h"
#include "cli/generate.h"
#include "cli/input.h"
#include "cli/progress_bar.h"
#include "cli/sampling_flags.h"
#include "core/stderr_print.h"

namespace fathom {
namespace {

struct ChatCommandOptions {
  ModelFlags model;
  SamplingFlags sampling;
  std::string system;
};

constexpr char kHelp[] =
    "  /file PATH   put a text file before your next message\n"
    "  /stats       speed of the last answer\n"
    "  /clear       start a new conversation\n"
    "  /help        this list\n"
    "  /quit        leave (also Ctrl-D); Ctrl-C stops an answer\n";

class Chat {
 public:
  Chat(Runtime& runtime, GenerateOptions options, std::string system)
      : runtime_(runtime),
        options_(std::move(options)),
        system_(std::move(system)),
        typed_(isatty(STDIN_FILENO) == 1 && isatty(STDOUT_FILENO) == 1),
        colour_(isatty(STDOUT_FILENO) == 1) {
    Clear();
  }

  // Until /quit or the end of input. False when an answer failed and nobody is there to see it.
  bool Run() {
    if (typed_) {
      fmt::print("{} — {} tokens of context. /help lists the commands.\n", runtime_.directory,
                 runtime_.engine_options.max_model_len);
    }
    bool good = true;
    while (std::optional<std::string> line = ReadLine()) {
      if (line->empty()) continue;
      if (*line == "/quit" || *line == "/exit") break;
      const Status status = line->front() == '/' ? Obey(*line) : Answer(*line);
      if (status) continue;
      PrintStderr("fathom: {}\n", status.error().message);
      good = good && typed_;
    }
    return good;
  }

 private:
  std::optional<std::string> ReadLine() {
    if (!typed_) {
      std::string line;
      if (!std::getline(std::cin, line)) return std::nullopt;
      return line;
    }
    std::optional<std::string> message = ReadTyped("> ");
    // Lines that are there already were pasted together: one message.
    while (message && !message->empty() && message->front() != '/' && InputWaits()) {
      const std::optional<std::string> next = ReadTyped("");
      if (!next) break;
      *message += "\n" + *next;
    }
    if (message && !message->empty()) add_history(message->c_str());
    return message;
  }

  // A line from the terminal. Ctrl-C drops what is typed and asks again; Ctrl-D ends.
  static std::optional<std::string> ReadTyped(const char* prompt) {
    for (;;) {
      const InterruptScope interrupt;
      rl_catch_signals = 0;  // libedit's own handler would go on reading after Ctrl-C
      const std::unique_ptr<char, void (*)(void*)> line(readline(prompt), &std::free);
      if (!InterruptScope::interrupted()) {
        if (line != nullptr) return std::string(line.get());
        fmt::print("\n");
        return std::nullopt;
      }
      fmt::print("\n(Ctrl-D or /quit leaves)\n");
      prompt = "> ";
    }
  }

  static bool InputWaits() {
    pollfd input = {.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    return poll(&input, 1, 20) == 1 && (input.revents & POLLIN) != 0;
  }

  Status Obey(const std::string& line) {
    const std::string command = line.substr(0, line.find(' '));
    if (command == "/help") {
      fmt::print("{}", kHelp);
    } else if (command == "/clear") {
      Clear();
    } else if (command == "/stats") {
      fmt::print("{}\n", stats_ ? stats_->Describe() : "no answer yet");
    } else if (command == "/file") {
      if (line.size() < 7) return Fail(Code::kInvalidArgument, "/file needs a path");
      return LoadFile(line.substr(6));
    } else {
      return Fail(Code::kInvalidArgument, "{} is no command; /help lists them", command);
    }
    return {};
  }

  Status LoadFile(const std::string& path) {
    FATHOM_ASSIGN(const std::string text, ReadDocument(path));
    const auto tokens = static_cast<int64_t>(
        runtime_.tokenizer->Encode(document_ + text, AddedTokens::kInert).size());
    const int64_t limit = runtime_.engine_options.max_model_len;
    if (tokens >= limit) {
      return Fail(Code::kInvalidArgument,
                  "{}: {} tokens{} do not fit in the context of {}; the file is not kept", path,
                  tokens, document_.empty() ? "" : " with what is attached already", limit);
    }
    document_ += text;
    fmt::print("{}: {} tokens. Ask about it.\n", path, tokens);
    return {};
  }

  Status Answer(const std::string& question) {
    messages_.push_back({.role = ChatMessage::Role::kUser, .content = document_ + question});
    Expected<ChatMessage> reply = Generated();
    if (!reply) {
      messages_.pop_back();
      if (!document_.empty()) {
        reply.error().message += "; the document is still attached (/clear drops it)";
      }
      return tl::unexpected<Error>(std::move(reply.error()));
    }
    document_.clear();
    messages_.push_back(std::move(*reply));
    return {};
  }

  // Streams the answer to messages_ and returns it.
  Expected<ChatMessage> Generated() {
    FATHOM_ASSIGN(std::vector<TokenId> prompt,
                  runtime_.encoder->Encode(messages_, {.thinking = options_.thinking}));
    ChatMessage reply{.role = ChatMessage::Role::kAssistant};
    ProgressBar bar("reading");
    const InterruptScope interrupt;
    const auto show = [&](const OutputDelta& delta) {
      bar.Clear();
      if (!delta.reasoning.empty()) Dim(delta.reasoning);
      if (!delta.content.empty() && reply.content.empty() && !reply.reasoning.empty()) {
        fmt::print("\n");
      }
      fmt::print("{}", delta.content);
      std::fflush(stdout);
      reply.reasoning += delta.reasoning;
      reply.content += delta.content;
    };
    FATHOM_ASSIGN(
        stats_,
        RunGeneration(runtime_, std::move(prompt), options_,
                      {.progress = [&bar](int64_t done, int64_t total) { bar.Update(done, total); },
                       .text = show}));
    bar.Clear();
    fmt::print("\n");
    if (stats_->finish == FinishReason::kCancelled) {
      return Fail(Code::kCancelled, "stopped; the question is not part of the conversation");
    }
    return reply;
  }

  void Dim(const std::string& text) const {
    if (colour_) fmt::print("\x1b[2m{}\x1b[0m", text);
    else fmt::print("{}", text);
  }

  void Clear() {
    messages_.clear();
    document_.clear();
    if (!system_.empty()) {
      messages_.push_back({.role = ChatMessage::Role::kSystem, .content = system_});
    }
  }

  Runtime& runtime_;
  GenerateOptions options_;
  std::string system_;
  bool typed_;
  bool colour_;
  std::vector<ChatMessage> messages_;
  std::string document_;  // goes before the next question
  std::optional<GenerateStats> stats_;
};

Expected<bool> RunChat(const ChatCommandOptions& options, Command& command) {
  FATHOM_ASSIGN(const RuntimeOptions runtime_options, FinishModelFlags(command, options.model));
  FATHOM_ASSIGN(const std::unique_ptr<Runtime> runtime, LoadRuntime(runtime_options));
  Chat chat(*runtime,
            MakeGenerateOptions(command, options.sampling, options.model, runtime->defaults),
            options.system);
  return chat.Run();
}

}  // namespace

void AddChatCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<ChatCommandOptions>();
  auto command = Command::Add(app, "chat", "A conversation in the terminal",
                              "  fathom chat\n"
                              "  fathom chat deepseek-ai/DeepSeek-V4-Flash --thinking\n"
                              "  printf '/file manual.txt\\nWhat is it about?\\n' | fathom chat");
  command->Text("--system", options->system, "TEXT", "system message");
  options->model.options.max_num_seqs = 1;
  AddSamplingFlags(*command, options->sampling);
  AddModelFlags(*command, options->model, ModelArgument::kPositional);
  command->OnRun(exit_code, [options](Command& self) {
    const Expected<bool> good = RunChat(*options, self);
    if (!good) return ReportError(good.error());
    return *good ? 0 : 1;
  });
}

}  // namespace fathom
