// `fathom version`: what this binary is and what it would run on.
#include <fmt/format.h>

#include <memory>

#include "api/version.h"
#include "cli/commands.h"
#include "core/cpu_features.h"

namespace fathom {

void AddVersionCommand(CLI::App& app, int* exit_code) {
  auto command =
      Command::Add(app, "version", "Version, compiler and instruction set", "  fathom version");
  command->OnRun(exit_code, [](Command&) {
    fmt::print("fathom {}\ncompiler {}\ncpu      {}\n", kVersion, __VERSION__, IsaName(CpuIsa()));
    return 0;
  });
}

}  // namespace fathom
