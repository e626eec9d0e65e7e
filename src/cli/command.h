// Command: one subcommand of `fathom` and its settings, which come from four places, strongest
// first: the flag, the environment variable FATHOM_<NAME>, the file of --config, the default.
//
//   void AddTokenizeCommand(CLI::App& app, int* exit_code) {
//     auto options = std::make_shared<TokenizeOptions>();
//     auto command = Command::Add(app, "tokenize", "Text to token ids", kExamples);
//     command->Text("--tokenizer", options->tokenizer, "FILE", "tokenizer.json to use");
//     command->Switch("--count", options->count, "print only the number of tokens");
//     command->OnRun(exit_code, [options](Command&) { return RunTokenize(*options); });
//   }
//
// Every setting has one long flag; switches have a --no- form. Whatever does not parse, in any of
// the sources, ends the program with a sentence that names the flag, variable or file key.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"

namespace CLI {  // <CLI/CLI.hpp> is heavy: who calls into it includes it
class App;
class Option;
}  // namespace CLI

namespace fathom {

// Exit status of a command line that cannot be understood.
inline constexpr int kUsageError = 2;

enum class Origin { kDefault, kFile, kEnvironment, kFlag };

class Command : public std::enable_shared_from_this<Command> {
 public:
  // `examples` are lines shown under the help text.
  static std::shared_ptr<Command> Add(CLI::App& parent, const std::string& name,
                                      const std::string& summary, const std::string& examples);

  // Each binds `value`, which holds the default and outlives the command (share it with OnRun).
  // `type` is the placeholder in the help text.
  void Text(const std::string& flag, std::string& value, const std::string& type,
            const std::string& help);
  // One value a flag, so that an argument can follow; repeated flags add up. A JSON list of texts
  // is as many values. Comma-separated in environment variables. No value may be empty.
  void List(const std::string& flag, std::vector<std::string>& value, const std::string& type,
            const std::string& help);
  // In any case of letters. `synonyms` are other names of choices that the help text leaves out.
  void Choice(const std::string& flag, std::string& value, const std::vector<std::string>& choices,
              const std::string& help, const std::map<std::string, std::string>& synonyms = {});
  // Integers in [low, high]; 256k is 256,000, 256K is 262,144 (vLLM's rule), also m/M, g/G and t/T.
  // `flag` may name several spellings, "--kv-cache-memory,--kv-cache-memory-bytes": the first one
  // is the setting's name. With `automatic`, auto and -1 mean 0.
  void Count(const std::string& flag, int64_t& value, int64_t low, int64_t high,
             const std::string& help, bool automatic = false);
  void Count(const std::string& flag, int& value, int64_t low, int64_t high,
             const std::string& help, bool automatic = false);
  void Real(const std::string& flag, double& value, double low, double high,
            const std::string& help);
  void Switch(const std::string& flag, bool& value, const std::string& help);
  // A positional argument, also FATHOM_<NAME> and `name:` in the file.
  void Positional(const std::string& name, std::string& value, const std::string& help);

  // A flag of another engine that means nothing here; `why` completes the sentence "--flag has no
  // effect: ". Given ones are listed by Notices(). A switch takes no value.
  // With `accepted`, any other value is refused (the value of a switch is true or false).
  void NoEffect(const std::string& flag, bool is_switch, const std::string& why,
                const std::vector<std::string>& accepted = {});

  void NotEmpty(const std::string& flag);  // of Text: an empty value that is given is refused
  void Secret(const std::string& flag);    // its value is never printed
  void Hide(const std::string& flag);      // leaves a flag out of the help text

  // Runs `body` when this subcommand is chosen, all settings resolved; its result is the exit code.
  void OnRun(int* exit_code, std::function<int(Command&)> body);

  CLI::App& app() { return *app_; }
  Origin origin(const std::string& flag) const;

  // "name: value  # origin" for every setting: YAML that --config reads back to the same settings.
  // Secrets and what has no value are comments.
  std::string PrintConfig() const;
  std::vector<std::string> Notices() const;

 private:
  template <class T>
  void AddCount(const std::string& flag, T& value, int64_t low, int64_t high,
                const std::string& help, bool automatic);

  struct Setting {
    std::string key;                   // the flag without dashes
    std::vector<std::string> aliases;  // its other spellings, without dashes
    CLI::Option* option = nullptr;
    std::function<std::string()> show;
    Origin origin = Origin::kDefault;
    std::string origin_name;
    bool is_switch = false;
    bool is_list = false;
    bool secret = false;
    bool hidden = false;
    bool positional = false;
    std::string no_effect;  // the reason, for such flags
  };

  explicit Command(CLI::App* app) : app_(app) {}
  Setting& Register(const std::string& flag, CLI::Option* option,
                    std::function<std::string()> show);
  Setting* Find(const std::string& key);
  void Resolve();
  void Apply(Setting& setting, const std::string& text, Origin origin, const std::string& name);

  CLI::App* app_;
  std::vector<std::unique_ptr<Setting>> settings_;
  std::string config_path_;
};

// vLLM's habit: --max_model_len is --max-model-len. Only the part before the first '.' or '='.
std::vector<std::string> NormaliseArguments(int argc, char** argv);

// What CLI11 cannot tell apart or words badly, checked and rewritten before it parses: `--flag=` is
// the flag with an empty value, `help [COMMAND]` the help text; a command or flag that does not
// exist is refused by name, with the nearest one there is.
Expected<std::vector<std::string>> PrepareArguments(const CLI::App& app,
                                                    std::vector<std::string> arguments);

// "25k" to 25000, "1M" to 1048576; see Command::Count. Errors say whether it is no whole number,
// too large or has an unknown suffix.
Expected<int64_t> ParseCount(const std::string& text);

// "FATHOM_MAX_MODEL_LEN" for "max-model-len".
std::string EnvironmentName(const std::string& key);

// Prints "fathom: <message>" to standard error and returns 1 (kUsageError for bad input).
int ReportError(const Error& error);

}  // namespace fathom
