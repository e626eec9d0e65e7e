#include "cli/command.h"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>

#include "cli/config_file.h"
#include "core/stderr_print.h"

namespace fathom {
namespace {

std::string ToLower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

std::string ToUpper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

// Quoted when plain YAML would read it as something else than the same string.
std::string YamlScalar(const std::string& text) {
  const bool control =
      std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  if (control) {  // a double-quoted scalar is the only one that keeps line breaks
    return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }
  const bool plain = !text.empty() && text != "null" && text != "~" && text != "Null" &&
                     text != "NULL" &&
                     text.find_first_of(":#{}[]&*!|>'\"%@`,\n ") == std::string::npos &&
                     text[0] != '-' && text[0] != '?';
  if (plain) return text;
  std::string quoted = "'";
  for (char c : text) {
    quoted += c;
    if (c == '\'') quoted += '\'';
  }
  return quoted + "'";
}

// The setting's name: the first spelling of `flag` without its dashes.
std::string KeyOf(const std::string& flag) {
  const std::string first = flag.substr(0, flag.find(','));
  return first.substr(first.find_first_not_of('-'));
}

// The texts of a JSON list; nothing when `text` is none.
std::optional<std::vector<std::string>> JsonTexts(const std::string& text) {
  if (text.empty() || text.front() != '[') return std::nullopt;
  const nlohmann::json list = nlohmann::json::parse(text, nullptr, false);
  if (!list.is_array()) return std::nullopt;
  std::vector<std::string> texts;
  for (const nlohmann::json& item : list) {
    if (!item.is_string()) return std::nullopt;
    texts.push_back(item.get<std::string>());
  }
  return texts;
}

// Insertions, removals and replacements that make `a` of `b`.
size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j < row.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

// "; did you mean --port?" when a flag of `command` is near.
std::string NearestFlag(const CLI::App& command, const std::string& flag) {
  std::string nearest;
  size_t best = std::max<size_t>(2, flag.size() / 4) + 1;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      const size_t distance = EditDistance("--" + name, flag);
      if (distance >= best) continue;
      best = distance;
      nearest = "--" + name;
    }
  }
  return nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest);
}

// vLLM's suffixes, and t.
struct Scale {
  std::string_view suffix;
  int64_t factor;
};
constexpr Scale kScales[] = {{"", 1},
                             {"k", 1'000},
                             {"K", int64_t{1} << 10},
                             {"m", 1'000'000},
                             {"M", int64_t{1} << 20},
                             {"g", 1'000'000'000},
                             {"G", int64_t{1} << 30},
                             {"t", 1'000'000'000'000},
                             {"T", int64_t{1} << 40}};

double Number(const std::string& flag, const std::string& text) {
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || rest != end || !std::isfinite(number)) {
    throw CLI::ValidationError(flag, fmt::format("'{}' is not a number", text));
  }
  return number;
}

void CheckRange(const std::string& flag, double value, double low, double high) {
  if (value >= low && value <= high) return;
  throw CLI::ValidationError(
      flag, std::isinf(high) ? fmt::format("{} is less than {}", value, low)
                             : fmt::format("{} is not between {} and {}", value, low, high));
}

int64_t CountInRange(const std::string& flag, const std::string& text, int64_t low, int64_t high,
                     bool automatic) {
  if (automatic && (ToLower(text) == "auto" || text == "-1")) return 0;
  Expected<int64_t> count = ParseCount(text);
  if (!count) throw CLI::ValidationError(flag, count.error().message);
  if (*count < low || *count > high) {
    throw CLI::ValidationError(flag, fmt::format("{} is not between {} and {}", *count, low, high));
  }
  return *count;
}

// Switches without CLI11's mark of what their negation means, "{false}".
class SwitchFormatter : public CLI::Formatter {
 public:
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override {
    std::string name = CLI::Formatter::make_option_name(option, is_positional);
    constexpr std::string_view kMark = "{false}";
    for (size_t at; (at = name.find(kMark)) != name.npos;) name.erase(at, kMark.size());
    return name;
  }
};

}  // namespace

std::shared_ptr<Command> Command::Add(CLI::App& parent, const std::string& name,
                                      const std::string& summary, const std::string& examples) {
  CLI::App* app = parent.add_subcommand(name, summary);
  app->footer("Examples:\n" + examples + "\n");
  app->formatter(std::make_shared<SwitchFormatter>());
  std::shared_ptr<Command> command(new Command(app));
  command->Text("--config", command->config_path_, "FILE",
                "YAML file with the same names as the flags");
  return command;
}

Command::Setting& Command::Register(const std::string& flag, CLI::Option* option,
                                    std::function<std::string()> show) {
  auto setting = std::make_unique<Setting>();
  setting->key = KeyOf(flag);
  for (const std::string& name : option->get_lnames()) {
    if (name != setting->key && name != "no-" + setting->key) setting->aliases.push_back(name);
  }
  setting->option = option;
  setting->show = std::move(show);
  settings_.push_back(std::move(setting));
  return *settings_.back();
}

Command::Setting* Command::Find(const std::string& key) {
  for (auto& setting : settings_) {
    const auto& aliases = setting->aliases;
    if (setting->key == key || std::find(aliases.begin(), aliases.end(), key) != aliases.end()) {
      return setting.get();
    }
  }
  return nullptr;
}

void Command::Text(const std::string& flag, std::string& value, const std::string& type,
                   const std::string& help) {
  CLI::Option* option = app_->add_option(flag, value, help)->type_name(type);
  if (!value.empty()) option->capture_default_str();
  Register(flag, option, [&value] { return YamlScalar(value); });
}

void Command::List(const std::string& flag, std::vector<std::string>& value,
                   const std::string& type, const std::string& help) {
  const auto take = [flag, type, &value](const CLI::results_t& results) {
    std::vector<std::string> items;
    for (const std::string& result : results) {
      const auto texts = JsonTexts(result).value_or(std::vector<std::string>{result});
      items.insert(items.end(), texts.begin(), texts.end());
    }
    if (std::find(items.begin(), items.end(), "") != items.end()) {
      throw CLI::ValidationError(flag, type + " must not be empty");
    }
    value = std::move(items);
    return true;
  };
  CLI::Option* option = app_->add_option(flag, take, help)->type_name(type)->type_size(1);
  option->expected(1)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  Register(flag, option, [&value] {
    std::vector<std::string> items;
    for (const std::string& item : value) items.push_back(YamlScalar(item));
    return fmt::format("[{}]", fmt::join(items, ", "));
  }).is_list = true;
}

void Command::Choice(const std::string& flag, std::string& value,
                     const std::vector<std::string>& choices, const std::string& help,
                     const std::map<std::string, std::string>& synonyms) {
  CLI::Option* option =
      app_->add_option_function<std::string>(
              flag,
              [flag, &value, choices, synonyms](const std::string& text) {
                std::string chosen = ToLower(text);
                if (const auto other = synonyms.find(chosen); other != synonyms.end()) {
                  chosen = other->second;
                }
                if (std::find(choices.begin(), choices.end(), chosen) == choices.end()) {
                  throw CLI::ValidationError(
                      flag, fmt::format("'{}' is not one of {}", text, fmt::join(choices, ", ")));
                }
                value = chosen;
              },
              help)
          ->type_name(fmt::format("{{{}}}", fmt::join(choices, ",")))
          ->default_str(value);
  Register(flag, option, [&value] { return YamlScalar(value); });
}

template <class T>
void Command::AddCount(const std::string& flag, T& value, int64_t low, int64_t high,
                       const std::string& help, bool automatic) {
  CLI::Option* option =
      app_->add_option_function<std::string>(
              flag,
              [flag, &value, low, high, automatic](const std::string& text) {
                value = static_cast<T>(CountInRange(flag, text, low, high, automatic));
              },
              help)
          ->type_name("N");
  if (value != 0) option->default_str(std::to_string(value));
  Register(flag, option, [&value, automatic] {
    return automatic && value == 0 ? "auto" : std::to_string(value);
  });
}

void Command::Count(const std::string& flag, int64_t& value, int64_t low, int64_t high,
                    const std::string& help, bool automatic) {
  AddCount(flag, value, low, high, help, automatic);
}

void Command::Count(const std::string& flag, int& value, int64_t low, int64_t high,
                    const std::string& help, bool automatic) {
  AddCount(flag, value, low, high, help, automatic);
}

void Command::Real(const std::string& flag, double& value, double low, double high,
                   const std::string& help) {
  CLI::Option* option = app_->add_option_function<std::string>(
                                flag,
                                [flag, &value, low, high](const std::string& text) {
                                  const double number = Number(flag, text);
                                  CheckRange(flag, number, low, high);
                                  value = number;
                                },
                                help)
                            ->type_name("X")
                            ->default_str(fmt::format("{}", value));
  Register(flag, option, [&value] { return fmt::format("{}", value); });
}

void Command::Switch(const std::string& flag, bool& value, const std::string& help) {
  const std::string names = fmt::format("{},!--no-{}", flag, KeyOf(flag));
  CLI::Option* option = app_->add_flag(names, value, value ? help + "; on by default" : help);
  Register(flag, option, [&value] { return value ? "true" : "false"; }).is_switch = true;
}

void Command::Positional(const std::string& name, std::string& value, const std::string& help) {
  CLI::Option* option = app_->add_option(name, value, help)->type_name("");
  Setting& setting = Register(name, option, [&value] { return YamlScalar(value); });
  setting.positional = true;
}

void Command::NoEffect(const std::string& flag, bool is_switch, const std::string& why,
                       const std::vector<std::string>& accepted) {
  auto text = std::make_shared<std::string>();
  const std::function<void(const std::string&)> take = [flag, text, why,
                                                        accepted](const std::string& given) {
    if (!accepted.empty() && std::find(accepted.begin(), accepted.end(), given) == accepted.end()) {
      throw CLI::ValidationError(flag, fmt::format("'{}' is not supported: {}", given, why));
    }
    *text = given;
  };
  CLI::Option* option = nullptr;
  if (is_switch) {
    const std::function<void(int64_t)> take_switch = [take](int64_t count) {
      take(count > 0 ? "true" : "false");
    };
    option = app_->add_flag(fmt::format("{},!--no-{}", flag, KeyOf(flag)), take_switch);
  } else {
    option = app_->add_option_function<std::string>(flag, take);
  }
  option->group("");  // not in the help text: it does nothing
  Setting& setting = Register(flag, option, [text] { return YamlScalar(*text); });
  setting.is_switch = is_switch;
  setting.no_effect = why;
}

void Command::NotEmpty(const std::string& flag) {
  CLI::Option* option = Find(KeyOf(flag))->option;
  option->check([type = option->get_type_name()](const std::string& text) {
    return text.empty() ? type + " must not be empty" : std::string();
  });
}

void Command::Secret(const std::string& flag) {
  Find(KeyOf(flag))->secret = true;
}

void Command::Hide(const std::string& flag) {
  Setting* setting = Find(KeyOf(flag));
  setting->hidden = true;
  setting->option->group("");
}

void Command::Apply(Setting& setting, const std::string& text, Origin origin,
                    const std::string& name) {
  setting.origin = origin;
  setting.origin_name = name;
  CLI::Option* option = setting.option;
  try {
    if (setting.is_switch) {
      const int64_t flag = CLI::detail::to_flag_value(text);
      option->add_result(flag > 0 ? "true" : "false");
    } else if (setting.is_list) {
      const auto texts = JsonTexts(text);
      if (texts && texts->empty()) return;
      for (const std::string& item : texts.value_or(CLI::detail::split(text, ','))) {
        option->add_result(item);
      }
    } else {
      option->add_result(text);
    }
    option->run_callback();
  } catch (const std::exception& error) {
    throw CLI::ValidationError(
        name, fmt::format("'{}' does not fit {}: {}", setting.secret ? "(hidden)" : text,
                          setting.key, error.what()));
  }
}

void Command::Resolve() {
  for (auto& setting : settings_) {
    if (setting->option->count() > 0) {
      setting->origin = Origin::kFlag;
      setting->origin_name = setting->positional ? "argument" : "--" + setting->key;
      continue;
    }
    std::vector<std::string> names = {setting->key};
    names.insert(names.end(), setting->aliases.begin(), setting->aliases.end());
    for (const std::string& key : names) {
      const std::string name = EnvironmentName(key);
      const char* text = std::getenv(name.c_str());
      // An empty variable is one that is not set, but an empty secret is a mistake, and not one to
      // be taken for "no secret".
      if (text == nullptr || (*text == '\0' && !setting->secret)) continue;
      Apply(*setting, text, Origin::kEnvironment, name);
      break;
    }
  }
  if (config_path_.empty()) {
    if (origin("--config") == Origin::kDefault) return;
    throw CLI::ValidationError("--config", "FILE must not be empty");
  }
  Expected<std::vector<ConfigEntry>> entries =
      ReadConfigFile(config_path_, [this](const std::string& key) { return Find(key) != nullptr; });
  if (!entries) throw CLI::ValidationError("--config", entries.error().message);
  for (const ConfigEntry& entry : *entries) {
    const std::string where = fmt::format("{}:{}", config_path_, entry.line);
    Setting* setting = Find(entry.key);
    if (setting == nullptr || setting->key == "config") {
      throw CLI::ValidationError(where, fmt::format("unknown setting '{}'", entry.key));
    }
    if (setting->origin != Origin::kDefault) continue;  // a stronger source has spoken
    Apply(*setting, entry.value, Origin::kFile, where);
  }
}

void Command::OnRun(int* exit_code, std::function<int(Command&)> body) {
  app_->callback([self = shared_from_this(), exit_code, body = std::move(body)] {
    self->Resolve();
    *exit_code = body(*self);
  });
}

Origin Command::origin(const std::string& flag) const {
  for (const auto& setting : settings_) {
    if (setting->key == KeyOf(flag)) return setting->origin;
  }
  FATHOM_CHECK(false);
  return Origin::kDefault;
}

std::string Command::PrintConfig() const {
  std::string text;
  for (const auto& setting : settings_) {
    if (setting->key == "config" || setting->key == "print-config") continue;
    if (!setting->no_effect.empty() && setting->origin == Origin::kDefault) continue;
    const std::string value = setting->show();
    const bool is_default = setting->origin == Origin::kDefault;
    const bool empty = value == "''" || value == "[]";
    const bool secret = setting->secret && !empty;
    // What no source has given and has no value to show says nothing when it is read back.
    const bool comment = secret || (is_default && (empty || setting->hidden));
    const std::string line =
        fmt::format("{}{}: {}", comment ? "# " : "", setting->key, secret ? "'(hidden)'" : value);
    const std::string from = setting->origin == Origin::kDefault ? "default" : setting->origin_name;
    text += fmt::format("{:<44} # {}{}\n", line, from,
                        setting->no_effect.empty() ? "" : "; no effect: " + setting->no_effect);
  }
  return text;
}

std::vector<std::string> Command::Notices() const {
  std::vector<std::string> notices;
  for (const auto& setting : settings_) {
    if (setting->no_effect.empty() || setting->origin == Origin::kDefault) continue;
    notices.push_back(fmt::format("--{} has no effect: {}", setting->key, setting->no_effect));
  }
  return notices;
}

std::vector<std::string> NormaliseArguments(int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  for (std::string& argument : arguments) {
    if (argument == "--") break;
    if (argument.rfind("--", 0) != 0) continue;
    const size_t end = std::min(argument.find_first_of(".="), argument.size());
    std::replace(argument.begin(), argument.begin() + static_cast<ptrdiff_t>(end), '_', '-');
  }
  return arguments;
}

Expected<std::vector<std::string>> PrepareArguments(const CLI::App& app,
                                                    std::vector<std::string> arguments) {
  if (!arguments.empty() && arguments[0] == "help") {
    arguments.erase(arguments.begin());
    arguments.resize(std::min<size_t>(arguments.size(), 1));
    arguments.push_back("--help");
  }
  if (arguments.empty() || arguments[0].rfind('-', 0) == 0) return arguments;
  const CLI::App* command = nullptr;
  std::vector<std::string> names;
  for (const CLI::App* known : app.get_subcommands(nullptr)) {
    names.push_back(known->get_name());
    if (names.back() == arguments[0]) command = known;
  }
  if (command == nullptr) {
    return Fail(Code::kInvalidArgument, "there is no command '{}'; commands are: {}", arguments[0],
                fmt::join(names, ", "));
  }
  std::vector<std::string> prepared = {arguments[0]};
  for (size_t i = 1; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--") {
      prepared.insert(prepared.end(), arguments.begin() + static_cast<ptrdiff_t>(i),
                      arguments.end());
      break;
    }
    if (argument.rfind("--", 0) != 0) {
      prepared.push_back(argument);
      continue;
    }
    const size_t equals = argument.find('=');
    const std::string flag = argument.substr(0, equals);
    const CLI::Option* option = command->get_option_no_throw(flag);
    if (option == nullptr) {
      return FailParam(Code::kInvalidArgument, flag, "{} is no flag of {}{}", flag, arguments[0],
                       NearestFlag(*command, flag));
    }
    const bool takes_value = option->get_items_expected_max() > 0;
    if (equals != std::string::npos && equals + 1 == argument.size()) {
      if (!takes_value) {
        return FailParam(Code::kInvalidArgument, flag, "{}: the value after = is empty", flag);
      }
      prepared.push_back(flag);
      prepared.emplace_back();
      continue;
    }
    prepared.push_back(argument);
    // The value is whatever follows, also when it looks like a flag.
    if (takes_value && equals == std::string::npos && i + 1 < arguments.size()) {
      prepared.push_back(arguments[++i]);
    }
  }
  return prepared;
}

Expected<int64_t> ParseCount(const std::string& text) {
  const auto refuse = [&](const std::string& why) -> Expected<int64_t> {
    return Fail(Code::kInvalidArgument, "'{}' {}", text, why);
  };
  const std::string no_number = "is not a whole number (25000, 25k, 1M)";
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const std::string too_large = fmt::format("is too large: the most is {}", kMost);
  const char* begin = text.data();
  const char* end = begin + text.size();
  double number = 0;
  const auto [rest, error] = std::from_chars(begin, end, number);
  if (error == std::errc::invalid_argument || std::isnan(number)) return refuse(no_number);
  const std::string suffix(rest, end);
  const Scale* scale = std::find_if(std::begin(kScales), std::end(kScales),
                                    [&](const Scale& known) { return suffix == known.suffix; });
  if (scale == std::end(kScales)) {
    return refuse(
        fmt::format("ends in '{}', which is no suffix: known are k, m, g, t (powers of "
                    "1000) and K, M, G, T (powers of 1024)",
                    suffix));
  }
  // Digits alone are exact beyond what a double holds.
  int64_t digits = 0;
  if (const auto whole = std::from_chars(begin, rest, digits);
      whole.ec == std::errc() && whole.ptr == rest) {
    int64_t value = 0;
    if (__builtin_mul_overflow(digits, scale->factor, &value)) return refuse(too_large);
    return value;
  }
  // What is out of a double's range is so at either end: 1e999, 1e-999.
  if (error == std::errc::result_out_of_range) {
    return refuse(text.find('-', 1) == std::string::npos ? too_large : no_number);
  }
  const double value = number * static_cast<double>(scale->factor);
  if (std::isinf(number)) return refuse(no_number);
  if (std::fabs(value) >= 0x1p63) return refuse(too_large);
  if (value != std::floor(value)) return refuse(no_number);
  return static_cast<int64_t>(value);
}

std::string EnvironmentName(const std::string& key) {
  std::string name = "FATHOM_" + ToUpper(key);
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

int ReportError(const Error& error) {
  PrintStderr("fathom: {}\n", error.message);
  return error.code == Code::kInvalidArgument ? kUsageError : 1;
}

}  // namespace fathom
