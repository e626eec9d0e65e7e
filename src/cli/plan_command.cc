// `fathom plan`: the memory plan of a model from its config.json, before anything is loaded.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "cache/plan_text.h"
#include "cache/what_if.h"
#include "cli/commands.h"
#include "cli/model_flags.h"
#include "cli/model_source.h"
#include "cli/plan_json.h"
#include "cli/runtime_plan.h"
#include "core/amounts.h"
#include "core/stderr_print.h"

namespace fathom {
namespace {

struct PlanFlags {
  RuntimeOptions options;  // what serve calls by the same names
  std::string numerics = "product";
  int batch = 1;
  int gpus = 1;
  int64_t memory = 0;
  std::vector<std::string> compare;
  bool what_if = false;
  bool json = false;
};

// The device of the plan: this machine's where a share of its memory is asked for, else one of
// --memory bytes that need not be here.
Expected<DeviceMemory> PlannedDevice(const PlanFlags& flags, bool memory_given) {
  DeviceMemory device{.gpu = flags.gpus > 1 || RunsOnGpu(flags.options.device),
                      .total = flags.memory};
  if (memory_given || flags.options.gpu_memory_utilization <= 0) return device;
  FATHOM_ASSIGN(const std::unique_ptr<ops::Backend> gpu, OpenDevice(device.gpu ? "cuda" : "cpu"));
  return MemoryOf(gpu.get());
}

Expected<PlanRequest> MakeRequest(const PlanFlags& flags, const Command& command) {
  const auto given = [&](const char* flag) { return command.origin(flag) != Origin::kDefault; };
  RuntimeOptions options = flags.options;
  options.numerics =
      flags.numerics == "reference" ? ops::Numerics::kReference : ops::Numerics::kProduct;
  if (flags.gpus > 1 && options.device == "cpu") {
    return FailParam(Code::kInvalidArgument, "--gpus", "--gpus {} contradicts --device cpu",
                     flags.gpus);
  }
  // A batch given alone brings the slots and the step it needs.
  if (!given("--max-num-seqs")) options.max_num_seqs = std::max(options.max_num_seqs, flags.batch);
  const bool memory_given = given("--memory");
  FATHOM_ASSIGN(const DeviceMemory device, PlannedDevice(flags, memory_given));
  FATHOM_ASSIGN(PlanRequest request, MakePlanRequest(options, device));
  if (!given("--max-num-batched-tokens")) {
    request.step_tokens = std::max(request.step_tokens, request.slots);
  }
  const double share = options.gpu_memory_utilization;
  if (memory_given) {
    request.memory =
        share > 0 ? static_cast<int64_t>(share * static_cast<double>(flags.memory)) : flags.memory;
  }
  request.sequences = flags.batch;
  request.gpus = flags.gpus;
  return request;
}

// Whether the plan fits; it is printed in either case.
Expected<bool> RunPlan(const PlanFlags& flags, const Command& command) {
  FATHOM_TRY(CheckModelGiven(command, flags.options.model));
  FATHOM_ASSIGN(const ModelSource model,
                OpenModel(flags.options.model, flags.options.hf_overrides));
  FATHOM_ASSIGN(const PlanRequest request, MakeRequest(flags, command));
  FATHOM_ASSIGN(const MemoryPlan plan, PlanMemory(model.config, request));
  std::vector<Comparison> comparisons;
  for (const std::string& name : flags.compare) {
    FATHOM_ASSIGN(Comparison comparison,
                  Compare(name, model.config, plan.sequence, plan.request.context));
    comparisons.push_back(std::move(comparison));
  }
  WhatIf what_if;
  if (flags.what_if) {
    FATHOM_ASSIGN(what_if, MakeWhatIf(model.config, request));
  }
  if (flags.json) {
    nlohmann::ordered_json json = PlanJson(model.name, model.config, plan, comparisons);
    if (flags.what_if) json["what_if"] = WhatIfJson(what_if);
    fmt::print("{}\n", json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else if (flags.what_if) {
    fmt::print("{}", WhatIfText(what_if));
  } else {
    fmt::print("{}", PlanText(model.name, model.config, plan, comparisons));
  }
  if (!plan.fits() && flags.what_if && !flags.json) {  // the tables do not say so
    PrintStderr("fathom: it does not fit: {} are missing; without --what-if: what would fit\n",
                BytesAndAmount(plan.shortfall));
  }
  return plan.fits();
}

void AddFlags(Command& command, PlanFlags& flags) {
  RuntimeOptions& options = flags.options;
  command.Positional("model", options.model,
                     "directory, config.json or org/name; left out: the demo model");
  AddHfOverridesFlag(command, options.hf_overrides);
  command.Count("--context,--max-model-len", options.max_model_len, 0, int64_t{1} << 32,
                "tokens of the longest sequence; left out or auto: the model's own", true);
  command.Count("--batch", flags.batch, 1, 65536,
                "sequences of that length that must fit together");
  command.Count("--gpus", flags.gpus, 1, 65536,
                "devices: routed experts divided, all else on each");
  command.Count("--memory", flags.memory, 0, int64_t{1} << 50, "bytes of one device, say 141G");
  command.Real("--gpu-memory-utilization", options.gpu_memory_utilization, 0, 1,
               "share of --memory, or of this machine's, for weights, workspaces and cache");
  command.Count("--kv-cache-memory,--kv-cache-memory-bytes", options.kv_cache_memory, 0,
                int64_t{1} << 50, "bytes for the cache alone");
  command.Choice("--kv-cache-dtype", options.kv_cache_dtype, {"auto", "bf16", "fp8"},
                 "format of the attention cache; auto: fp8",
                 {{"fp8_e4m3", "fp8"}, {"fp8_ds_mla", "fp8"}, {"bfloat16", "bf16"}});
  command.Choice("--attention-config.indexer_kv_dtype", options.indexer_kv_dtype,
                 {"auto", "bf16", "fp8", "mxfp4"}, "format of the indexer's cache; auto: mxfp4");
  command.Count("--block-size", options.block_size, 1, 1 << 20,
                "tokens of a cache block, a multiple of 128");
  command.Count("--max-num-seqs", options.max_num_seqs, 1, 65536, "sequences running at once");
  command.Count("--max-num-batched-tokens", options.max_num_batched_tokens, 1, 1 << 20,
                "tokens of one step; left out or auto: 512, on a GPU 4096", true);
  command.Switch("--enable-prefix-caching", options.reuse.prefix_caching,
                 "without it no bundles are reserved");
  command.Choice("--device", options.device, {"auto", "cpu", "cuda"},
                 "where the model is to run; auto: as serve would here");
  command.Choice("--numerics", flags.numerics, {"product", "reference"},
                 "reference: float32 throughout");
  command.Count("--threads", options.threads, 0, 4096, "compute threads of a CPU");
  command.List("--compare", flags.compare, "NAME",
               "v3.2 or mha: the cache of such attention beside this one; may be repeated");
  command.Switch("--what-if", flags.what_if,
                 "tables over contexts, batches, formats, block sizes and GPUs");
  command.Switch("--json", flags.json, "for machines: the keys of docs/plan.md");
}

}  // namespace

void AddPlanCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<PlanFlags>();
  auto command = Command::Add(
      app, "plan", "The memory plan of a model, from its config.json alone",
      "  fathom plan deepseek-ai/DeepSeek-V4-Flash --gpus 4 --memory 80G\n"
      "  fathom plan config.json --context 128K --batch 32 --device cuda --compare v3.2\n"
      "  fathom plan models/demo --what-if\n"
      "  fathom plan config.json --hf-overrides '{\"n_routed_experts\": 128}'\n"
      "The exit status is 1 when it does not fit.");
  AddFlags(*command, *flags);
  command->OnRun(exit_code, [flags](Command& self) {
    const Expected<bool> fits = RunPlan(*flags, self);
    return !fits ? ReportError(fits.error()) : *fits ? 0 : 1;
  });
}

}  // namespace fathom
