#include "cli/command.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cli/config_file.h"

namespace fathom {
namespace {

std::string ToUpper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

// Quoted when plain YAML would read it as something else than the same string.
std::string YamlScalar(const std::string& text) {
  const bool plain = !text.empty() &&
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

std::string KeyOf(const std::string& flag) {
  return flag.substr(flag.find_first_not_of('-'));
}

void CheckRange(const std::string& flag, double value, double low, double high) {
  if (value >= low && value <= high) return;
  throw CLI::ValidationError(
      flag, std::isinf(high) ? fmt::format("{} is less than {}", value, low)
                             : fmt::format("{} is not between {} and {}", value, low, high));
}

int64_t CountInRange(const std::string& flag, const std::string& text, int64_t low, int64_t high) {
  Expected<int64_t> count = ParseCount(text);
  if (!count) throw CLI::ValidationError(flag, count.error().message);
  if (*count < low || *count > high) {
    throw CLI::ValidationError(flag, fmt::format("{} is not between {} and {}", *count, low, high));
  }
  return *count;
}

}  // namespace

std::shared_ptr<Command> Command::Add(CLI::App& parent, const std::string& name,
                                      const std::string& summary, const std::string& examples) {
  CLI::App* app = parent.add_subcommand(name, summary);
  app->footer("Examples:\n" + examples + "\n");
  std::shared_ptr<Command> command(new Command(app));
  command->Text("--config", command->config_path_, "FILE",
                "YAML file with the same names as the flags");
  return command;
}

Command::Setting& Command::Register(const std::string& flag, CLI::Option* option,
                                    std::function<std::string()> show) {
  auto setting = std::make_unique<Setting>();
  setting->key = KeyOf(flag);
  setting->environment = EnvironmentName(setting->key);
  setting->option = option;
  setting->show = std::move(show);
  settings_.push_back(std::move(setting));
  return *settings_.back();
}

Command::Setting* Command::Find(const std::string& key) {
  for (auto& setting : settings_) {
    if (setting->key == key) return setting.get();
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
                   const std::string& type, const std::string& help, bool several) {
  CLI::Option* option = app_->add_option(flag, value, help)->type_name(type);
  option->allow_extra_args(several);
  Register(flag, option, [&value] {
    std::vector<std::string> items;
    for (const std::string& item : value) items.push_back(YamlScalar(item));
    return fmt::format("[{}]", fmt::join(items, ", "));
  }).is_list = true;
}

void Command::Choice(const std::string& flag, std::string& value,
                     const std::vector<std::string>& choices, const std::string& help) {
  CLI::Option* option =
      app_->add_option_function<std::string>(
              flag,
              [flag, &value, choices](const std::string& text) {
                if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
                  throw CLI::ValidationError(
                      flag, fmt::format("'{}' is not one of {}", text, fmt::join(choices, ", ")));
                }
                value = text;
              },
              help)
          ->type_name(fmt::format("{{{}}}", fmt::join(choices, ",")))
          ->default_str(value);
  Register(flag, option, [&value] { return YamlScalar(value); });
}

void Command::Count(const std::string& flag, int64_t& value, int64_t low, int64_t high,
                    const std::string& help) {
  CLI::Option* option = app_->add_option_function<std::string>(
                                flag,
                                [flag, &value, low, high](const std::string& text) {
                                  value = CountInRange(flag, text, low, high);
                                },
                                help)
                            ->type_name("N");
  if (value != 0) option->default_str(std::to_string(value));
  Register(flag, option, [&value] { return std::to_string(value); });
}

void Command::Count(const std::string& flag, int& value, int64_t low, int64_t high,
                    const std::string& help) {
  CLI::Option* option = app_->add_option_function<std::string>(
                                flag,
                                [flag, &value, low, high](const std::string& text) {
                                  value = static_cast<int>(CountInRange(flag, text, low, high));
                                },
                                help)
                            ->type_name("N");
  if (value != 0) option->default_str(std::to_string(value));
  Register(flag, option, [&value] { return std::to_string(value); });
}

void Command::Real(const std::string& flag, double& value, double low, double high,
                   const std::string& help) {
  CLI::Option* option = app_->add_option_function<double>(
                                flag,
                                [flag, &value, low, high](const double& number) {
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
  CLI::Option* option = app_->add_flag(names, value, help);
  Register(flag, option, [&value] { return value ? "true" : "false"; }).is_switch = true;
}

void Command::Positional(const std::string& name, std::string& value, const std::string& help) {
  CLI::Option* option = app_->add_option(name, value, help)->type_name("");
  Setting& setting = Register(name, option, [&value] { return YamlScalar(value); });
  setting.positional = true;
}

void Command::NoEffect(const std::string& flag, bool is_switch, const std::string& why) {
  auto text = std::make_shared<std::string>();
  CLI::Option* option = is_switch
                            ? app_->add_flag(fmt::format("{},!--no-{}", flag, KeyOf(flag)), *text)
                            : app_->add_option(flag, *text);
  option->group("");  // not in the help text: it does nothing
  Setting& setting = Register(flag, option, [text] { return YamlScalar(*text); });
  setting.is_switch = is_switch;
  setting.no_effect = why;
}

void Command::Secret(const std::string& flag) {
  Find(KeyOf(flag))->secret = true;
}

void Command::Hide(const std::string& flag) {
  Find(KeyOf(flag))->option->group("");
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
      for (const std::string& item : CLI::detail::split(text, ',')) option->add_result(item);
    } else {
      option->add_result(text);
    }
    option->run_callback();
  } catch (const std::exception& error) {
    throw CLI::ValidationError(
        name, fmt::format("'{}' does not fit {}: {}", text, setting.key, error.what()));
  }
}

void Command::Resolve() {
  for (auto& setting : settings_) {
    if (setting->option->count() > 0) {
      setting->origin = Origin::kFlag;
      setting->origin_name = setting->positional ? "argument" : "--" + setting->key;
      continue;
    }
    const char* text = std::getenv(setting->environment.c_str());
    if (text == nullptr || *text == '\0') continue;
    Apply(*setting, text, Origin::kEnvironment, setting->environment);
  }
  if (config_path_.empty()) return;
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
    const bool hidden = setting->secret && value != "''" && value != "[]";
    const std::string line = fmt::format("{}: {}", setting->key, hidden ? "'(hidden)'" : value);
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

Expected<int64_t> ParseCount(const std::string& text) {
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  double scale = 1;
  if (error == std::errc() && end - rest == 1) {
    switch (*rest) {
      case 'k': scale = 1e3; break;
      case 'K': scale = 1024.0; break;
      case 'm': scale = 1e6; break;
      case 'M': scale = 1024.0 * 1024; break;
      case 'g': scale = 1e9; break;
      case 'G': scale = 1024.0 * 1024 * 1024; break;
      default: scale = 0;
    }
  } else if (error != std::errc() || rest != end) {
    scale = 0;
  }
  const double value = number * scale;
  if (scale == 0 || value != std::floor(value) || std::fabs(value) > 9e15) {
    return Fail(Code::kInvalidArgument, "'{}' is not a whole number (25000, 25k, 1M)", text);
  }
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
  fmt::print(stderr, "fathom: {}\n", error.message);
  return error.code == Code::kInvalidArgument ? kUsageError : 1;
}

}  // namespace fathom
