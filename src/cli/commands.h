// The subcommands of `fathom`. Each function registers one on `app`; when it is chosen it leaves
// the process's exit status in *exit_code. See command.h for how to write one.
#pragma once

#include "cli/command.h"

namespace fathom {

void AddServeCommand(CLI::App& app, int* exit_code);
void AddChatCommand(CLI::App& app, int* exit_code);
void AddCompleteCommand(CLI::App& app, int* exit_code);
void AddTokenizeCommand(CLI::App& app, int* exit_code);
void AddPlanCommand(CLI::App& app, int* exit_code);
void AddCacheCommand(CLI::App& app, int* exit_code);
void AddExplainCommand(CLI::App& app, int* exit_code);
void AddDumpCommand(CLI::App& app, int* exit_code);
void AddVersionCommand(CLI::App& app, int* exit_code);

}  // namespace fathom
