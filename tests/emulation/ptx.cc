// Inline PTX: parsed once, then interpreted.
#include <cctype>
#include <cstdlib>
#include <map>
#include <string_view>
#include <vector>

#include "emulator_core.h"

namespace emu {

namespace {

enum class Op : uint8_t {
  kNothing,
  kUnknown,
  kMov,
  kSetp,
  kBra,
  kBarSync,
  kBarArrive,
  kClusterArrive,
  kClusterWait,
  kMbarrierInit,
  kMbarrierForget,
  kMbarrierArrive,
  kMbarrierExpect,
  kMbarrierTry,
  kMbarrierTest,
  kBulkFromGlobal,
  kBulkFromShared,
  kStoreAsync,
  kMapa,
  kCopyAsync,
  kCopyAsyncCommit,
  kCopyAsyncWait,
  kCopyAsyncWaitAll,
  kLoad,
  kStore,
  kMma,
  kWgmma,
  kWgmmaCommit,
  kWgmmaWait,
  kMulBf16x2,
  kAddBf16x2,
  kSubBf16x2,
  kFmaBf16x2,
  kMaxBf16x2,
  kCvtBf16x2,
  kPrmt,
  kEx2,
  kRcp,
  kRsqrt,
  kTanh,
  kGridWait,
  kAligned,
  kAtomic,
  kElect,
  kPreempt,
  kAdd,
  kSub,
};

enum class Space : uint8_t { kGeneric, kGlobal, kShared };

struct Arg {
  enum Kind : uint8_t { kOperand, kRegister, kImmediate, kThread, kSink } kind = kSink;
  bool memory = false;
  int index = 0;
  uint64_t value = 0;  // or the offset of an address
};
using Args = std::vector<Arg>;  // more than one: a vector {a, b}

struct Instruction {
  Op op = Op::kNothing;
  int predicate = -1;
  bool negated = false;
  Space space = Space::kGeneric;
  uint32_t bytes = 4;  // of an element
  bool is_signed = false, is_float = false;
  int extra = 0;  // condition of setp, operation of an atomic
  bool flag = false;
  int target = -1;
  MmaShape mma = {};
  WgmmaShape wgmma = {};
  std::vector<Args> args;
  std::string text;
};

bool Has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}
bool Begins(std::string_view text, std::string_view part) {
  return text.substr(0, part.size()) == part;
}
bool Ends(std::string_view text, std::string_view part) {
  return text.size() >= part.size() && text.substr(text.size() - part.size()) == part;
}

}  // namespace

struct Code {
  std::vector<Instruction> instructions;
  std::string place, text;
};

std::string TextOf(const Code* code) {
  return code->place + " \"" + code->text + "\"";
}

namespace {

struct Parser {
  Code& code;
  std::map<std::string, int> registers;
  std::map<std::string, int> labels;
  std::vector<std::pair<size_t, std::string>> jumps;

  static std::string Trim(std::string_view text) {
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) {
      text.remove_prefix(1);
    }
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) {
      text.remove_suffix(1);
    }
    return std::string(text);
  }
  static std::vector<std::string> Split(std::string_view text) {
    std::vector<std::string> pieces;
    int depth = 0;
    size_t begin = 0;
    for (size_t i = 0; i <= text.size(); ++i) {
      if (i == text.size() || (text[i] == ',' && depth == 0)) {
        std::string piece = Trim(text.substr(begin, i - begin));
        if (!piece.empty()) pieces.push_back(std::move(piece));
        begin = i + 1;
      } else if (text[i] == '{' || text[i] == '[') {
        ++depth;
      } else if (text[i] == '}' || text[i] == ']') {
        --depth;
      }
    }
    return pieces;
  }

  [[noreturn]] void Wrong(const std::string& what) {
    Fail("PTX at %s: %s in \"%s\"", code.place.c_str(), what.c_str(), code.text.c_str());
  }

  Arg Single(const std::string& text) {
    Arg arg;
    if (text == "_") return arg;
    if (text == "%%tid.x") {
      arg.kind = Arg::kThread;
      return arg;
    }
    if (text[0] == '%' && std::isdigit(static_cast<unsigned char>(text[1]))) {
      arg.kind = Arg::kOperand;
      arg.index = std::atoi(text.c_str() + 1);
      return arg;
    }
    if (Begins(text, "0f") || Begins(text, "0F")) {
      arg.kind = Arg::kImmediate;
      arg.value = std::strtoull(text.c_str() + 2, nullptr, 16);
      return arg;
    }
    if (std::isdigit(static_cast<unsigned char>(text[0])) || text[0] == '-') {
      arg.kind = Arg::kImmediate;
      arg.value = static_cast<uint64_t>(std::strtoll(text.c_str(), nullptr, 0));
      return arg;
    }
    const auto found = registers.find(text);
    if (found == registers.end()) Wrong("unknown register " + text);
    arg.kind = Arg::kRegister;
    arg.index = found->second;
    return arg;
  }
  Args Operands(const std::string& text) {
    if (text[0] == '{') {
      Args args;
      for (const std::string& piece : Split(std::string_view(text).substr(1, text.size() - 2))) {
        args.push_back(Single(piece));
      }
      return args;
    }
    if (text[0] == '[') {
      const std::string inner = Trim(std::string_view(text).substr(1, text.size() - 2));
      const size_t plus = inner.find('+');
      Arg arg = Single(Trim(inner.substr(0, plus)));
      arg.memory = true;
      if (plus != std::string::npos) {
        if (arg.kind == Arg::kImmediate) Wrong("an address");
        arg.value = std::strtoull(Trim(inner.substr(plus + 1)).c_str(), nullptr, 0);
      }
      return {arg};
    }
    return {Single(text)};
  }

  void Statement(std::string text) {
    text = Trim(text);
    while (!text.empty() && (text[0] == '{' || text[0] == '}')) text = Trim(text.substr(1));
    // Labels.
    while (true) {
      size_t i = 0;
      while (i < text.size() &&
             (std::isalnum(static_cast<unsigned char>(text[i])) || text[i] == '_' ||
              text[i] == '$' || text[i] == '%' || text[i] == '=')) {
        ++i;
      }
      if (i == 0 || i >= text.size() || text[i] != ':' ||
          (i + 1 < text.size() && text[i + 1] == ':')) {
        break;
      }
      labels[text.substr(0, i)] = static_cast<int>(code.instructions.size());
      text = Trim(text.substr(i + 1));
    }
    if (text.empty()) return;
    if (Begins(text, ".reg")) {
      const size_t type = text.find('.', 1);
      const size_t names = text.find_first_of(" \t\n", type);
      for (const std::string& name : Split(std::string_view(text).substr(names))) {
        const auto slot = static_cast<int>(registers.size());
        registers[name] = slot;
        if (slot >= 16) Wrong("too many registers");
      }
      return;
    }
    Instruction in;
    in.text = text;
    if (text[0] == '@') {
      const size_t end = text.find_first_of(" \t\n");
      std::string name = text.substr(1, end - 1);
      if (name[0] == '!') {
        in.negated = true;
        name = name.substr(1);
      }
      const auto found = registers.find(name);
      if (found == registers.end()) Wrong("unknown predicate " + name);
      in.predicate = found->second;
      text = Trim(text.substr(end));
    }
    const size_t end = std::min(text.size(), text.find_first_of(" \t\n"));
    const std::string op = text.substr(0, end);
    const std::string rest = Trim(text.substr(end));
    Decode(op, in);
    if (in.op == Op::kBra) {
      jumps.emplace_back(code.instructions.size(), rest);
    } else if (in.op != Op::kNothing) {
      for (const std::string& piece : Split(rest)) {
        // setp's "p|q" and the like are not needed.
        in.args.push_back(Operands(piece));
      }
    }
    code.instructions.push_back(std::move(in));
  }

  static uint32_t BytesOf(const std::string& op) {
    const size_t dot = op.rfind('.');
    const std::string type = op.substr(dot + 1);
    if (type == "bf16x2" || type == "f16x2") return 4;
    const int bits = std::atoi(type.c_str() + 1);
    return static_cast<uint32_t>(bits / 8);
  }

  void Decode(const std::string& op, Instruction& in) {
    in.op = Op::kUnknown;
    const std::string type = op.substr(op.rfind('.') + 1);
    in.is_signed = type[0] == 's';
    in.is_float = type[0] == 'f';
    if (Has(op, ".shared")) in.space = Space::kShared;
    else if (Has(op, ".global")) in.space = Space::kGlobal;
    if (Begins(op, "mov.")) {
      in.op = Op::kMov;
      in.bytes = BytesOf(op);
    } else if (Begins(op, "setp.")) {
      in.op = Op::kSetp;
      in.bytes = BytesOf(op);
      const std::string condition = op.substr(5, 2);
      in.extra = condition == "eq"   ? 0
                 : condition == "ne" ? 1
                 : condition == "lt" ? 2
                 : condition == "le" ? 3
                 : condition == "gt" ? 4
                                     : 5;
      if (in.is_float) in.op = Op::kUnknown;
    } else if (Begins(op, "bra")) {
      in.op = Op::kBra;
    } else if (Begins(op, "barrier.cluster.arrive")) {
      in.op = Op::kClusterArrive;
      in.flag = Has(op, ".aligned");
    } else if (Begins(op, "barrier.cluster.wait")) {
      in.op = Op::kClusterWait;
      in.flag = Has(op, ".aligned");
    } else if (Begins(op, "bar.sync") || Begins(op, "bar.cta.sync") || Begins(op, "barrier.sync") ||
               Begins(op, "barrier.cta.sync")) {
      in.op = Op::kBarSync;
    } else if (Begins(op, "bar.arrive") || Begins(op, "bar.cta.arrive") ||
               Begins(op, "barrier.arrive") || Begins(op, "barrier.cta.arrive")) {
      in.op = Op::kBarArrive;
    } else if (Begins(op, "mbarrier.init")) {
      in.op = Op::kMbarrierInit;
    } else if (Begins(op, "mbarrier.inval")) {
      in.op = Op::kMbarrierForget;
    } else if (Begins(op, "mbarrier.arrive.expect_tx")) {
      in.op = Op::kMbarrierExpect;
    } else if (Begins(op, "mbarrier.arrive") && !Has(op, "no_complete")) {
      in.op = Op::kMbarrierArrive;
    } else if (Begins(op, "mbarrier.try_wait") && Has(op, ".parity")) {
      in.op = Op::kMbarrierTry;
    } else if (Begins(op, "mbarrier.test_wait") && Has(op, ".parity")) {
      in.op = Op::kMbarrierTest;
    } else if (Begins(op, "cp.async.bulk.prefetch") || Begins(op, "prefetch") ||
               Begins(op, "createpolicy") || Begins(op, "setmaxnreg") ||
               Begins(op, "griddepcontrol.launch_dependents") || Begins(op, "wgmma.fence") ||
               Begins(op, "applypriority") || Begins(op, "discard")) {
      in.op = Op::kNothing;
    } else if (Begins(op, "fence") || Begins(op, "membar")) {
      in.op = Op::kPreempt;
    } else if (Begins(op, "griddepcontrol.wait")) {
      in.op = Op::kGridWait;
    } else if (Begins(op, "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes") ||
               Begins(op, "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes")) {
      if (!Has(op, "multicast")) in.op = Op::kBulkFromGlobal;
    } else if (Begins(op,
                      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes")) {
      in.op = Op::kBulkFromShared;
    } else if (Begins(op, "cp.async.commit_group")) {
      in.op = Op::kCopyAsyncCommit;
    } else if (Begins(op, "cp.async.wait_group")) {
      in.op = Op::kCopyAsyncWait;
    } else if (Begins(op, "cp.async.wait_all")) {
      in.op = Op::kCopyAsyncWaitAll;
    } else if (Begins(op, "cp.async.cg.shared") || Begins(op, "cp.async.ca.shared")) {
      in.op = Op::kCopyAsync;
    } else if (Begins(op, "st.async")) {
      in.op = Op::kStoreAsync;
      in.bytes = BytesOf(op);
    } else if (Begins(op, "mapa.shared::cluster")) {
      in.op = Op::kMapa;
    } else if (Begins(op, "ld.") && !Has(op, "param")) {
      in.op = Op::kLoad;
      in.bytes = BytesOf(op);
      in.flag = Has(op, ".volatile") || Has(op, ".acquire") || Has(op, ".relaxed");
    } else if (Begins(op, "st.")) {
      in.op = Op::kStore;
      in.bytes = BytesOf(op);
      in.flag = Has(op, ".volatile") || Has(op, ".release") || Has(op, ".relaxed");
    } else if (Begins(op, "atom.") || Begins(op, "red.")) {
      in.bytes = BytesOf(op);
      in.flag = Begins(op, "red.") && !Has(op, ".async");
      in.extra = Has(op, ".add.")   ? 1
                 : Has(op, ".min.") ? 2
                 : Has(op, ".max.") ? 3
                 : Has(op, ".or.")  ? 4
                 : Has(op, ".and.") ? 5
                 : Has(op, ".exch") ? 6
                 : Has(op, ".cas")  ? 7
                                    : 0;
      in.op = in.extra != 0 && !Has(op, ".async") ? Op::kAtomic : Op::kUnknown;
    } else if (Begins(op, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")) {
      in.op = Op::kMma;
      in.mma = {false, false, false};
    } else if (Begins(op, "mma.sync.aligned.m16n8k32.row.col") && Begins(op.substr(33), ".s32.")) {
      in.op = Op::kMma;
      in.mma = {true, Has(op, ".s32.s8."), Has(op, ".s8.s32")};
    } else if (Begins(op, "wgmma.mma_async.sync.aligned.m64n")) {
      in.op = Op::kWgmma;
      in.wgmma.n = std::atoi(op.c_str() + 33);
      in.wgmma.integers = Has(op, ".s32.");
      in.wgmma.a_signed = Has(op, ".s32.s8.");
      if (in.wgmma.integers ? !Ends(op, "8.s8") || !Has(op, "k32.")
                            : !Ends(op, "k16.f32.bf16.bf16")) {
        in.op = Op::kUnknown;
      }
    } else if (Begins(op, "wgmma.commit_group")) {
      in.op = Op::kWgmmaCommit;
    } else if (Begins(op, "wgmma.wait_group")) {
      in.op = Op::kWgmmaWait;
    } else if (op == "mul.rn.bf16x2" || op == "mul.bf16x2") {
      in.op = Op::kMulBf16x2;
    } else if (op == "add.rn.bf16x2" || op == "add.bf16x2") {
      in.op = Op::kAddBf16x2;
    } else if (op == "sub.rn.bf16x2" || op == "sub.bf16x2") {
      in.op = Op::kSubBf16x2;
    } else if (op == "fma.rn.bf16x2") {
      in.op = Op::kFmaBf16x2;
    } else if (op == "max.bf16x2") {
      in.op = Op::kMaxBf16x2;
    } else if (op == "cvt.rn.bf16x2.f32") {
      in.op = Op::kCvtBf16x2;
    } else if (op == "prmt.b32") {
      in.op = Op::kPrmt;
    } else if (op == "ex2.approx.ftz.f32" || op == "ex2.approx.f32") {
      in.op = Op::kEx2;
    } else if (op == "rcp.approx.ftz.f32" || op == "rcp.approx.f32") {
      in.op = Op::kRcp;
    } else if (op == "rsqrt.approx.ftz.f32" || op == "rsqrt.approx.f32") {
      in.op = Op::kRsqrt;
    } else if (op == "tanh.approx.f32") {
      in.op = Op::kTanh;
    } else if ((Begins(op, "add.") || Begins(op, "sub.")) && !in.is_float && !Has(op, "x2")) {
      in.op = Begins(op, "add.") ? Op::kAdd : Op::kSub;
      in.bytes = BytesOf(op);
    }
  }

  void Run() {
    std::string text = code.text;
    // Comments are not expected. Statements end with ';'; braces of scopes stand alone.
    size_t begin = 0;
    for (size_t i = 0; i <= text.size(); ++i) {
      if (i == text.size() || text[i] == ';') {
        Statement(text.substr(begin, i - begin));
        begin = i + 1;
      }
    }
    for (const auto& [index, label] : jumps) {
      const auto found = labels.find(label);
      if (found == labels.end()) Wrong("unknown label " + label);
      code.instructions[index].target = found->second;
    }
    for (Instruction& in : code.instructions) {
      if (in.op == Op::kWgmma) {
        // d, a or its descriptor, b's descriptor, scale of d, then signs and transpositions.
        in.wgmma.a_shared = in.args.at(1).size() == 1;
        const size_t transposed = in.wgmma.a_shared ? 7 : 6;
        if (!in.wgmma.integers) in.extra = static_cast<int>(transposed);
      }
    }
  }
};

uint64_t AsBits(uint64_t value, uint32_t bytes) {
  return bytes >= 8 ? value : value & ((uint64_t{1} << (8 * bytes)) - 1);
}
int64_t AsSigned(uint64_t value, uint32_t bytes) {
  const unsigned shift = 64 - 8 * bytes;
  return static_cast<int64_t>(value << shift) >> shift;
}

uint16_t RoundToBf16(float x) {
  const uint32_t bits = Bits<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

struct Machine {
  const Operand* operands;
  uint64_t registers[16] = {};

  uint64_t Get(const Arg& arg) const {
    switch (arg.kind) {
      case Arg::kOperand: {
        const Operand& operand = operands[arg.index];
        uint64_t value = operand.value;
        if (operand.to != nullptr) std::memcpy(&value, operand.to, operand.bytes);
        return arg.memory ? value + arg.value : value;
      }
      case Arg::kRegister: return registers[arg.index] + (arg.memory ? arg.value : 0);
      case Arg::kImmediate: return arg.value;
      case Arg::kThread: return here->thread.x;
      case Arg::kSink: return 0;
    }
    return 0;
  }
  uint32_t Word(const Arg& arg) const { return static_cast<uint32_t>(Get(arg)); }
  float Float(const Arg& arg) const { return Bits<float>(Word(arg)); }
  void Set(const Arg& arg, uint64_t value) {
    if (arg.kind == Arg::kOperand) {
      const Operand& operand = operands[arg.index];
      if (operand.to == nullptr) Fail("PTX writes an input");
      std::memcpy(operand.to, &value, operand.bytes);
    } else if (arg.kind == Arg::kRegister) {
      registers[arg.index] = value;
    } else if (arg.kind == Arg::kImmediate) {
      Fail("PTX writes a constant");
    }
  }
  char* Memory(const Instruction& in, const Arg& arg, size_t bytes) const {
    const uint64_t at = Get(arg);
    if (in.space == Space::kShared) return CheckedShared(static_cast<uint32_t>(at), bytes);
    if (at % std::min<size_t>(bytes, 16) != 0) Fail("a misaligned access of %zu bytes", bytes);
    return reinterpret_cast<char*>(at);
  }
};

template <class Fn>
uint32_t Bf16Pairs(Fn&& fn) {
  uint32_t out = 0;
  for (int half = 0; half < 2; ++half) {
    out |= static_cast<uint32_t>(RoundToBf16(fn(16 * half))) << (16 * half);
  }
  return out;
}
float Half(uint32_t word, int shift) {
  return Bits<float>((word >> shift & 0xffffu) << 16);
}

}  // namespace

const Code* Compile(const char* text, const char* file, int line) {
  static auto* const cache = new std::map<std::string, Code*>;
  const char* slash = std::strstr(file, "src/");
  std::string place = std::string(slash != nullptr ? slash : file) + ":" + std::to_string(line);
  Code*& code = (*cache)[place + text];
  if (code == nullptr) {
    code = new Code;
    code->place = std::move(place);
    code->text = text;
    Parser{*code, {}, {}, {}}.Run();
  }
  return code;
}

void Execute(const Code* code, const Operand* operands) {
  SetCode(code);
  Machine m{operands};
  const auto count = static_cast<int>(code->instructions.size());
  for (int at = 0; at < count; ++at) {
    const Instruction& in = code->instructions[static_cast<size_t>(at)];
    if (in.predicate >= 0 && (m.registers[in.predicate] != 0) == in.negated) continue;
    const auto& a = in.args;
    switch (in.op) {
      case Op::kNothing: break;
      case Op::kUnknown: Fail("PTX that the emulator does not know: %s", in.text.c_str());
      case Op::kPreempt: Preempt(); break;
      case Op::kMov: m.Set(a[0][0], m.Get(a[1][0])); break;
      case Op::kAdd: m.Set(a[0][0], AsBits(m.Get(a[1][0]) + m.Get(a[2][0]), in.bytes)); break;
      case Op::kSub: m.Set(a[0][0], AsBits(m.Get(a[1][0]) - m.Get(a[2][0]), in.bytes)); break;
      case Op::kSetp: {
        const uint64_t x = AsBits(m.Get(a[1][0]), in.bytes), y = AsBits(m.Get(a[2][0]), in.bytes);
        const int64_t sx = AsSigned(x, in.bytes), sy = AsSigned(y, in.bytes);
        const bool less = in.is_signed ? sx < sy : x < y;
        const bool results[] = {x == y, x != y, less, less || x == y, !less && x != y, !less};
        m.Set(a[0][0], results[in.extra]);
        break;
      }
      case Op::kBra: at = in.target - 1; break;
      case Op::kBarSync:
        SyncBlockReduce(Meeting::kAdd, 0, Where::current(), static_cast<int>(m.Get(a[0][0])),
                        a.size() > 1 ? static_cast<int>(m.Get(a[1][0])) : 0);
        break;
      case Op::kBarArrive:
        ArriveBlock(static_cast<int>(m.Get(a[0][0])), static_cast<int>(m.Get(a[1][0])));
        break;
      case Op::kClusterArrive:
        if (in.flag) Meet(Meeting::kAligned, 0xffffffffu, nullptr, Where::current());
        ClusterArrive();
        break;
      case Op::kClusterWait:
        if (in.flag) Meet(Meeting::kAligned, 0xffffffffu, nullptr, Where::current());
        ClusterWait();
        break;
      case Op::kMbarrierInit: BarrierInit(m.Word(a[0][0]), m.Word(a[1][0])); break;
      case Op::kMbarrierForget: BarrierForget(m.Word(a[0][0])); break;
      case Op::kMbarrierArrive: {
        const size_t first = a[0][0].memory ? 0 : 1;
        BarrierArrive(m.Word(a[first][0]), a.size() > first + 1 ? m.Word(a[first + 1][0]) : 1, 0);
        break;
      }
      case Op::kMbarrierExpect: {
        const size_t first = a[0][0].memory ? 0 : 1;
        BarrierArrive(m.Word(a[first][0]), 1, m.Word(a[first + 1][0]));
        break;
      }
      case Op::kMbarrierTry:
        m.Set(a[0][0], BarrierTryWait(m.Word(a[1][0]), m.Word(a[2][0])));
        break;
      case Op::kMbarrierTest: m.Set(a[0][0], BarrierTest(m.Word(a[1][0]), m.Word(a[2][0]))); break;
      case Op::kBulkFromGlobal:
        CopyBulk(m.Word(a[0][0]), reinterpret_cast<const void*>(m.Get(a[1][0])), 0, m.Word(a[2][0]),
                 m.Word(a[3][0]));
        break;
      case Op::kBulkFromShared:
        CopyBulk(m.Word(a[0][0]), nullptr, m.Word(a[1][0]), m.Word(a[2][0]), m.Word(a[3][0]));
        break;
      case Op::kStoreAsync: {
        char value[16] = {};
        for (size_t i = 0; i < a[1].size(); ++i) {
          const uint64_t bits = m.Get(a[1][i]);
          std::memcpy(value + i * in.bytes, &bits, in.bytes);
        }
        StoreAsync(m.Word(a[0][0]), value, static_cast<uint32_t>(a[1].size()) * in.bytes,
                   m.Word(a[2][0]));
        break;
      }
      case Op::kMapa: m.Set(a[0][0], MapRank(m.Word(a[1][0]), m.Word(a[2][0]))); break;
      case Op::kCopyAsync: {
        const uint32_t bytes = m.Word(a[2][0]);
        CopyAsync(m.Word(a[0][0]), reinterpret_cast<const void*>(m.Get(a[1][0])), bytes,
                  a.size() > 3 ? m.Word(a[3][0]) : bytes);
        break;
      }
      case Op::kCopyAsyncCommit: CopyAsyncCommit(); break;
      case Op::kCopyAsyncWait: CopyAsyncWait(m.Word(a[0][0])); break;
      case Op::kCopyAsyncWaitAll: CopyAsyncWaitAll(); break;
      case Op::kLoad: {
        if (in.flag) Preempt();
        const size_t n = a[0].size();
        const char* from = m.Memory(in, a[1][0], n * in.bytes);
        char values[32];
        std::memcpy(values, from, n * in.bytes);
        for (size_t i = 0; i < n; ++i) {
          uint64_t bits = 0;
          std::memcpy(&bits, values + i * in.bytes, in.bytes);
          if (in.is_signed) bits = static_cast<uint64_t>(AsSigned(bits, in.bytes));
          m.Set(a[0][i], bits);
        }
        break;
      }
      case Op::kStore: {
        const size_t n = a[1].size();
        char* const to = m.Memory(in, a[0][0], n * in.bytes);
        for (size_t i = 0; i < n; ++i) {
          const uint64_t bits = m.Get(a[1][i]);
          std::memcpy(to + i * in.bytes, &bits, in.bytes);
        }
        if (in.flag) Preempt();
        break;
      }
      case Op::kAtomic: {
        Preempt();
        const size_t first = in.flag ? 0 : 1;
        char* const memory = m.Memory(in, a[first][0], in.bytes);
        uint64_t old = 0;
        std::memcpy(&old, memory, in.bytes);
        const uint64_t x = m.Get(a[first + 1][0]);
        const int64_t so = AsSigned(old, in.bytes), sx = AsSigned(x, in.bytes);
        uint64_t result = 0;
        if (in.is_float && in.bytes == 4 && in.extra == 1) {
          result = Bits<uint32_t>(Bits<float>(static_cast<uint32_t>(old)) +
                                  Bits<float>(static_cast<uint32_t>(x)));
        } else if (in.is_float) {
          Fail("PTX that the emulator does not know: %s", in.text.c_str());
        } else {
          const bool less = in.is_signed ? so < sx : AsBits(old, in.bytes) < AsBits(x, in.bytes);
          switch (in.extra) {
            case 1: result = old + x; break;
            case 2: result = less ? old : x; break;
            case 3: result = less ? x : old; break;
            case 4: result = old | x; break;
            case 5: result = old & x; break;
            case 6: result = x; break;
            default: result = AsBits(x, in.bytes) == old ? m.Get(a[first + 2][0]) : old; break;
          }
        }
        std::memcpy(memory, &result, in.bytes);
        if (!in.flag) m.Set(a[0][0], old);
        Preempt();
        break;
      }
      case Op::kMma: {
        uint32_t* d[4];
        uint32_t va[4], vb[2], vc[4];
        for (size_t i = 0; i < 4; ++i) {
          d[i] = static_cast<uint32_t*>(operands[a[0].at(i).index].to);
          va[i] = m.Word(a[1].at(i));
          vc[i] = m.Word(a[3].at(i));
        }
        for (size_t i = 0; i < 2; ++i) vb[i] = m.Word(a[2].at(i));
        WarpMma(in.mma, d, va, vb, vc);
        break;
      }
      case Op::kWgmma: {
        const size_t n = a[0].size();
        if (static_cast<int>(n) != in.wgmma.n / 2) Fail("wgmma: %zu results", n);
        char* const d = static_cast<char*>(operands[a[0][0].index].to);
        for (size_t i = 0; i < n; ++i) {
          if (operands[a[0][i].index].to != d + 4 * i) Fail("wgmma: results are not in a row");
        }
        uint32_t va[4] = {};
        if (!in.wgmma.a_shared) {
          for (size_t i = 0; i < 4; ++i) va[i] = m.Word(a[1].at(i));
        }
        WgmmaShape shape = in.wgmma;
        if (!shape.integers) {
          if (m.Get(a.at(4)[0]) != 1 || m.Get(a.at(5)[0]) != 1) Fail("wgmma: a negated operand");
          shape.b_transposed = m.Get(a.at(static_cast<size_t>(in.extra))[0]) != 0;
          if (shape.a_shared && m.Get(a.at(6)[0]) != 0) Fail("wgmma: A transposed");
        }
        WarpgroupMma(shape, d, shape.a_shared ? nullptr : va, shape.a_shared ? m.Get(a[1][0]) : 0,
                     m.Get(a[2][0]), m.Get(a[3][0]) != 0);
        break;
      }
      case Op::kWgmmaCommit: WgmmaCommit(); break;
      case Op::kWgmmaWait: WgmmaWait(m.Word(a[0][0])); break;
      case Op::kMulBf16x2: {
        const uint32_t x = m.Word(a[1][0]), y = m.Word(a[2][0]);
        m.Set(a[0][0], Bf16Pairs([&](int s) { return Half(x, s) * Half(y, s); }));
        break;
      }
      case Op::kAddBf16x2: {
        const uint32_t x = m.Word(a[1][0]), y = m.Word(a[2][0]);
        m.Set(a[0][0], Bf16Pairs([&](int s) { return Half(x, s) + Half(y, s); }));
        break;
      }
      case Op::kSubBf16x2: {
        const uint32_t x = m.Word(a[1][0]), y = m.Word(a[2][0]);
        m.Set(a[0][0], Bf16Pairs([&](int s) { return Half(x, s) - Half(y, s); }));
        break;
      }
      case Op::kMaxBf16x2: {
        const uint32_t x = m.Word(a[1][0]), y = m.Word(a[2][0]);
        m.Set(a[0][0], Bf16Pairs([&](int s) { return std::fmax(Half(x, s), Half(y, s)); }));
        break;
      }
      case Op::kFmaBf16x2: {
        const uint32_t x = m.Word(a[1][0]), y = m.Word(a[2][0]), z = m.Word(a[3][0]);
        m.Set(a[0][0], Bf16Pairs([&](int s) {
                return static_cast<float>(double{Half(x, s)} * Half(y, s) + Half(z, s));
              }));
        break;
      }
      case Op::kCvtBf16x2:  // the first source goes to the upper half
        m.Set(a[0][0], static_cast<uint32_t>(RoundToBf16(m.Float(a[1][0]))) << 16 |
                           RoundToBf16(m.Float(a[2][0])));
        break;
      case Op::kPrmt: {
        const uint64_t both = uint64_t{m.Word(a[2][0])} << 32 | m.Word(a[1][0]);
        const uint32_t selector = m.Word(a[3][0]);
        uint32_t out = 0;
        for (int i = 0; i < 4; ++i) {
          const uint32_t nibble = selector >> (4 * i) & 15u;
          auto byte = static_cast<uint32_t>(both >> (8 * (nibble & 7u)) & 0xffu);
          if ((nibble & 8u) != 0) byte = (byte & 0x80u) != 0 ? 0xffu : 0u;
          out |= byte << (8 * i);
        }
        m.Set(a[0][0], out);
        break;
      }
      case Op::kEx2: m.Set(a[0][0], Bits<uint32_t>(std::exp2(m.Float(a[1][0])))); break;
      case Op::kRcp: m.Set(a[0][0], Bits<uint32_t>(1.0f / m.Float(a[1][0]))); break;
      case Op::kRsqrt: m.Set(a[0][0], Bits<uint32_t>(rsqrtf(m.Float(a[1][0])))); break;
      case Op::kTanh: m.Set(a[0][0], Bits<uint32_t>(std::tanh(m.Float(a[1][0])))); break;
      case Op::kGridWait: GridWait(); break;
      case Op::kAligned: break;
      case Op::kElect: break;
    }
  }
}

void MultiplyBf16(const double (&a)[16][16], const double* b, int b_stride, int n, float* sums,
                  int stride) {
  for (int row = 0; row < 16; ++row) {
    for (int first = 0; first < n; first += 8) {
      double total[8] = {};
      for (int k = 0; k < 16; ++k) {
        const double x = a[row][k];
        const double* const y = b + k * b_stride + first;
        for (int i = 0; i < 8; ++i) total[i] += x * y[i];
      }
      float* const to = sums + row * stride + first;
      for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(to[i] + total[i]);
    }
  }
}

}  // namespace emu
