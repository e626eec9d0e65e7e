// `fathom`: the command line. One file per subcommand, registered below.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <system_error>

#include "api/version.h"
#include "cli/commands.h"
#include "core/cpu_features.h"

extern char** environ;

namespace {

// FATHOM_ variables that are no setting of a command.
bool IsProcessVariable(const std::string& name) {
  return name == "FATHOM_ISA" || name == "FATHOM_DEMO_MODEL" || name == "FATHOM_SHARED" ||
         name == "FATHOM_SOURCE_DIR" || name == "FATHOM_CONFIG" || name == "FATHOM_JOBS";
}

// A variable that no command knows is most likely misspelt: say so, rather than drop it silently.
void WarnOfUnknownVariables(const CLI::App& app) {
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name = std::string(*entry).substr(0, std::string(*entry).find('='));
    if (name.rfind("FATHOM_", 0) != 0 || IsProcessVariable(name)) continue;
    bool known = false;
    for (const CLI::App* command : app.get_subcommands(nullptr)) {
      for (const CLI::Option* option : command->get_options()) {
        std::vector<std::string> keys = option->get_lnames();
        keys.push_back(option->get_single_name());  // of a positional argument
        for (const std::string& key : keys) {
          known = known || fathom::EnvironmentName(key) == name;
        }
      }
    }
    if (!known) std::fprintf(stderr, "fathom: %s is no known setting\n", name.c_str());
  }
}

// The choice of kernels falls back silently where it is read; a person who set it wants to know.
fathom::Status CheckIsa() {
  const char* wish = std::getenv("FATHOM_ISA");
  if (wish == nullptr) return {};
  for (fathom::Isa isa : {fathom::Isa::kScalar, fathom::Isa::kAvx2, fathom::Isa::kAvx512}) {
    if (fathom::IsaName(isa) != wish) continue;
    if (fathom::SetCpuIsa(isa)) return {};
    return fathom::Fail(fathom::Code::kInvalidArgument, "FATHOM_ISA: this CPU lacks {}", wish);
  }
  return fathom::Fail(fathom::Code::kInvalidArgument,
                      "FATHOM_ISA: '{}' is not one of scalar, avx2, avx512", wish);
}

// What was printed may not have arrived: on a full disk a command has failed. A reader that has
// seen enough (`| head`) is no failure: SIGPIPE ends the command, or where whoever started it
// ignores that signal, the command ends as if all had been read.
int FinishOutput(int exit_code) {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return exit_code;
  const int reason = errno;
  if (reason == EPIPE) return exit_code;
  std::fprintf(stderr, "fathom: standard output: %s\n",
               std::generic_category().message(reason).c_str());
  return exit_code != 0 ? exit_code : 1;
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
  fathom::AddPlanCommand(app, &exit_code);
  fathom::AddCacheCommand(app, &exit_code);
  fathom::AddExplainCommand(app, &exit_code);
  fathom::AddDumpCommand(app, &exit_code);
  fathom::AddVersionCommand(app, &exit_code);
  app.set_version_flag("--version", std::string("fathom ") + fathom::kVersion);

  WarnOfUnknownVariables(app);
  if (const fathom::Status isa = CheckIsa(); !isa) return fathom::ReportError(isa.error());
  fathom::Expected<std::vector<std::string>> prepared =
      fathom::PrepareArguments(app, fathom::NormaliseArguments(argc, argv));
  if (!prepared) return fathom::ReportError(prepared.error());
  std::vector<std::string> arguments = std::move(*prepared);
  if (arguments.empty()) arguments.emplace_back("--help");
  std::reverse(arguments.begin(), arguments.end());  // CLI11's vector form is reversed
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::Success& help) {
    return FinishOutput(app.exit(help));
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "fathom: %s\n", error.what());
    return fathom::kUsageError;
  } catch (const std::system_error& error) {  // fmt::print could not write, say
    if (error.code().value() == EPIPE) return exit_code;
    std::fprintf(stderr, "fathom: %s\n", error.what());
    return 1;
  }
  return FinishOutput(exit_code);
}
