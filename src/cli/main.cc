// `fathom`: the command line. One file per subcommand, registered below.
#include <algorithm>
#include <cstdio>

#include "api/version.h"
#include "cli/commands.h"

extern char** environ;

namespace {

// FATHOM_ variables that are no setting of a command.
bool IsProcessVariable(const std::string& name) {
  return name == "FATHOM_ISA" || name == "FATHOM_DEMO_MODEL" || name == "FATHOM_SHARED" ||
         name == "FATHOM_SOURCE_DIR" || name == "FATHOM_CONFIG";
}

// A variable that no command knows is most likely misspelt: say so, rather than drop it silently.
void WarnOfUnknownVariables(const CLI::App& app) {
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name = std::string(*entry).substr(0, std::string(*entry).find('='));
    if (name.rfind("FATHOM_", 0) != 0 || IsProcessVariable(name)) continue;
    bool known = false;
    for (const CLI::App* command : app.get_subcommands(nullptr)) {
      for (const CLI::Option* option : command->get_options()) {
        std::string key = option->get_single_name();
        known = known || fathom::EnvironmentName(key) == name;
      }
    }
    if (!known) std::fprintf(stderr, "fathom: %s is no known setting\n", name.c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Fathom serves DeepSeek-V4 at up to 1,048,576 tokens of context.", "fathom");
  app.require_subcommand(1);
  app.footer(
      "Settings come from flags, FATHOM_* variables, --config FILE and defaults, in this order.\n"
      "Help on one command: fathom COMMAND --help\n");
  int exit_code = 0;
  fathom::AddServeCommand(app, &exit_code);
  fathom::AddChatCommand(app, &exit_code);
  fathom::AddCompleteCommand(app, &exit_code);
  fathom::AddTokenizeCommand(app, &exit_code);
  fathom::AddDumpCommand(app, &exit_code);
  fathom::AddVersionCommand(app, &exit_code);
  app.set_version_flag("--version", std::string("fathom ") + fathom::kVersion);

  WarnOfUnknownVariables(app);
  std::vector<std::string> arguments = fathom::NormaliseArguments(argc, argv);
  if (arguments.empty()) arguments.push_back("--help");
  std::reverse(arguments.begin(), arguments.end());  // CLI11's vector form is reversed
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "fathom: %s\n", error.what());
    return fathom::kUsageError;
  }
  return exit_code;
}
