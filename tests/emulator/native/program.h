// A PTX module: syntax (Statement, Operand) and its decoded form (Program, Instruction).
//
// Registers. Every PTX register has a slot: a byte offset into the register file of a warp. A slot holds the 32 lanes
// side by side: 32 x u32 for registers of up to 32 bits (8- and 16-bit ones zero-extended: keep the upper bits zero),
// 32 x u64, 2 x (32 x u64) for .b128 (low halves first).
// A predicate is one u32 with a bit a lane. Literals, addresses of symbols and the special registers that never change
// during a thread's life have slots too, filled when the warp is made, so that execution never asks what an operand is.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "error.h"

namespace emu {

struct Warp;
struct Instruction;

/// Byte offset into a warp's register file.
using Slot = uint32_t;
constexpr Slot kNoSlot = 0xffffffffu;

enum class Space : uint8_t { generic, global, shared_cta, shared_cluster, local, param, constant };

/// Fundamental types, as the last components of an opcode name them.
enum class Type : uint8_t {
  none, pred, b8, b16, b32, b64, b128, u8, u16, u32, u64, s8, s16, s32, s64,
  f16, f16x2, bf16, bf16x2, tf32, f32, f32x2, f64, e4m3x2, e5m2x2, e2m3x2, e3m2x2, e2m1x2, ue8m0x2,
  e4m3x4, e5m2x4, e2m3x4, e3m2x4, e2m1x4, u16x2, s16x2
};
/// Type::none if `name` names no type.
Type parse_type(const std::string& name);
const char* type_name(Type type);
/// Register bits of a value of this type (pred: 1).
int type_bits(Type type);
bool is_float(Type type);
bool is_signed(Type type);

// ---------------------------------------------------------------- syntax

/// One operand as written.
struct Operand {
  enum class Kind : uint8_t {
    none,
    reg,        // name, slot, bits (declared width; pred: 1); negated for !p
    literal,    // value: the bits of an integer, of a double (is_double) or of a 0f float (is_single)
    vector,     // {a, b, ...}: items
    address,    // [base + offset]: items[0] is the base (reg, symbol or literal); further items as in [tensorMap, {c0, c1}]
    symbol,     // a variable, parameter, function or label: name
    sink,       // _
  };
  Kind kind = Kind::none;
  std::string name;
  Slot slot = kNoSlot;
  int bits = 0;
  Type declared = Type::none;
  bool negated = false;
  bool is_double = false;
  bool is_single = false;
  uint64_t value = 0;
  int64_t offset = 0;
  std::vector<Operand> items;
  /// The second half of "d|p"; empty otherwise.
  std::vector<Operand> second;
};

/// One instruction as written.
struct Statement {
  int line = 0;                        // in the PTX text
  std::vector<std::string> opcode;     // split at dots: {"tcgen05", "mma", "cta_group::1", ...}
  std::string mnemonic;                // the same, joined
  std::vector<Operand> operands;
  Operand predicate;                   // Kind::none if there is none
  int scope = 0;
  int file = 0, source_line = 0;       // of the last .loc, 0 if none
};

// ---------------------------------------------------------------- decoded form

/// What the interpreter does after an instruction.
enum class Step : uint8_t {
  next,     // go on with the following instruction
  yield,    // as next, but let other warps run
  blocked,  // nothing was done: execute it again when the cluster has made progress (Warp::wait says what is awaited)
  jump,     // the program counter(s) have been set
  exit,     // the threads in the mask have ended
};

/// Executes one instruction for the lanes in `mask` (never empty; predicate already applied).
using Exec = Step (*)(Warp& warp, const Instruction& instruction, uint32_t mask);

/// Extra decoded data of one instruction; derive from it. Owned by the Program.
struct Payload {
  virtual ~Payload() = default;
};

struct Instruction {
  Exec exec = nullptr;
  Slot predicate = kNoSlot;
  bool predicate_negated = false;
  bool aligned = false;        // .aligned: the interpreter runs it only when all live lanes of the warp are here
  bool is_branch = false;
  bool touches_loads = false;  // shares a register with a tcgen05.ld, which may still have to fill it
  uint8_t flags = 0;           // for the family
  uint16_t opcode = 0;         // index into Program::opcodes, for statistics
  int line = 0;                // in the PTX text
  std::array<Slot, 8> slot{};  // operands, by the family's own convention
  int64_t offset = 0;          // address offset or another immediate
  uint64_t imm = 0;
  uint32_t wgmma_use = 0;      // index into Program::wgmma_uses; 0: it touches no register of a wgmma
  Payload* data = nullptr;
  template <class T>
  const T& as() const { return *static_cast<const T*>(data); }
};

/// A slot that is filled when a warp is made.
struct Constant {
  enum class Kind : uint8_t {
    literal, shared_symbol, dynamic_shared_symbol, local_symbol, param_symbol, global_symbol, special
  } kind;
  Slot slot;
  int bits;
  uint64_t value;   // literal bits, offset of the symbol in its space, or the Special
};

/// Special registers that are constant for a thread.
enum class Special : uint32_t {
  tid_x, tid_y, tid_z, ntid_x, ntid_y, ntid_z, ctaid_x, ctaid_y, ctaid_z, nctaid_x, nctaid_y, nctaid_z,
  laneid, warpid, nwarpid, smid, nsmid, gridid, lanemask_eq, lanemask_le, lanemask_lt, lanemask_ge, lanemask_gt,
  clusterid_x, clusterid_y, clusterid_z, nclusterid_x, nclusterid_y, nclusterid_z,
  cluster_ctaid_x, cluster_ctaid_y, cluster_ctaid_z, cluster_nctaid_x, cluster_nctaid_y, cluster_nctaid_z,
  cluster_ctarank, cluster_nctarank, is_explicit_cluster, dynamic_smem_size, total_smem_size, aggr_smem_size,
  // these change: read by their own instruction, never constant
  clock, clock_hi, clock64, globaltimer, globaltimer_lo, globaltimer_hi
};

struct Parameter {
  std::string name;
  uint32_t size = 0;
  uint32_t alignment = 1;
  uint32_t offset = 0;   // in the parameter block
  Type type = Type::none;
};

struct Variable {
  std::string name;
  Space space = Space::global;
  uint64_t size = 0;       // 0 for an extern unsized array (dynamic shared memory)
  uint32_t alignment = 1;
  uint64_t offset = 0;     // in its space
  bool dynamic_shared = false;
  std::vector<uint8_t> init;
};

/// A kernel or a function.
struct Function {
  std::string name;
  bool is_entry = false;
  std::vector<Parameter> params;      // of an entry: in the parameter block
  uint32_t param_bytes = 0;
  uint32_t first = 0, count = 0;      // its instructions in Program::code
  std::array<uint32_t, 3> reqntid{};  // 0 where not given
  std::array<uint32_t, 3> maxntid{};
  std::array<uint32_t, 3> reqnctapercluster{};
  uint32_t maxnreg = 0, minnctapersm = 0, maxclusterrank = 0;
  bool explicit_cluster = false;
  std::vector<Constant> constants;
  uint32_t register_bytes = 0;        // register file of a warp that runs it
  uint32_t static_shared = 0;         // bytes of static shared memory, from kSharedBase on
  uint32_t dynamic_alignment = 16;    // of the dynamic shared memory behind it
  uint32_t local_bytes = 0;           // a thread
};

/// The registers of wgmma instructions that another instruction touches: what it reads, then what it writes.
struct WgmmaUse {
  std::vector<uint32_t> registers;   // below Program::wgmma_registers
  size_t reads = 0;                  // how many of them it reads
};

struct Program {
  std::vector<std::string> lines;      // the PTX text
  std::vector<std::string> opcodes;    // full mnemonics, by Instruction::opcode
  std::vector<Instruction> code;
  std::vector<Function> functions;     // entries and functions
  std::vector<Variable> variables;
  std::vector<std::unique_ptr<Payload>> payloads;
  std::vector<WgmmaUse> wgmma_uses{{}};      // the first is empty
  uint32_t wgmma_registers = 0;              // registers that wgmma instructions use
  std::vector<std::pair<int, int>> source;   // of each instruction: (.file index, line), zeros if unknown
  std::map<int, std::string> files;
  std::string target;
  std::vector<uint8_t> global_init;    // image of module-scope .global/.const variables

  const Function* entry(const std::string& name) const;   // nullptr if none; "" is the only entry
};

/// Parses and decodes a module. Throws Verdict (parse, unsupported).
std::unique_ptr<Program> load_program(const std::string& text);

// ---------------------------------------------------------------- families of opcodes

/// Takes an opcode's modifiers one by one; whatever is left over at the end is an error that quotes the line.
class Modifiers {
 public:
  Modifiers(const Statement& statement, size_t used) : statement_(statement), next_(used) {}
  /// Takes `name` if it is the next modifier.
  bool take(const char* name);
  /// Takes the next modifier if it is one of `names`; returns its index, or `otherwise`. Throws if otherwise == -2.
  int take_one(std::initializer_list<const char*> names, int otherwise = -1);
  /// Takes `name` wherever it stands among the modifiers not yet taken.
  bool take_anywhere(const char* name);
  /// Takes a type; Type::none if the next modifier is none.
  Type take_type();
  Type need_type();
  /// "" at the end.
  std::string peek() const;
  /// Throws if a modifier is left.
  void done() const;

 private:
  const Statement& statement_;
  size_t next_;
  std::vector<size_t> taken_;
  void skip_taken();
};

/// An address operand: lane's slot plus offset. The slot holds u64 (or u32 zero-extended at run time, see bits).
struct Address {
  Slot base = kNoSlot;
  int bits = 64;          // width of the base slot: 32 or 64
  int64_t offset = 0;
};

/// Given to a decode function; turns operands into slots.
class Decoder {
 public:
  virtual ~Decoder() = default;
  /// Source of `bits` bits (1 for a predicate): a register, a literal (converted by `type`: an integer literal for
  /// integer and bit types, a float literal for float types) or a special register. A register that is wider or
  /// narrower than `bits` is refused unless `any_width`.
  virtual Slot source(const Operand& operand, Type type, bool any_width = false) = 0;
  /// Destination register; kNoSlot for a sink (_), where `may_sink` allows it.
  virtual Slot destination(const Operand& operand, Type type, bool may_sink = false, bool any_width = false) = 0;
  /// Operand::Kind::address -> slot and offset. `item` picks a further item of [a, b].
  virtual Address address(const Operand& operand) = 0;
  /// A slot for scratch values of 32 lanes.
  virtual Slot scratch(int bits) = 0;
  /// A literal integer operand.
  virtual int64_t immediate(const Operand& operand) = 0;
  /// Throws unless the statement has `low` to `high` operands.
  virtual void operand_count(const Statement& statement, size_t low, size_t high) = 0;
  /// Hands a payload over to the program.
  virtual void keep(Instruction& instruction, std::unique_ptr<Payload> payload) = 0;
  /// The instruction index of a label in the statement's function (filled in before execution).
  virtual void label(const Operand& operand, uint32_t* index) = 0;
  /// The same for the entries of a .branchtargets table.
  virtual void branch_table(const Operand& operand, std::vector<uint32_t>* indices) = 0;
  /// Index into Program::functions; unsupported() if the module has no body for it.
  virtual uint32_t function(const Operand& operand) = 0;
  /// Where a parameter (or return value) of function `index` lives in a thread's local memory.
  virtual std::vector<std::pair<uint64_t, uint32_t>> formals(uint32_t index, bool returns) = 0;
  /// Local offset and size of a .param variable of this body.
  virtual std::pair<uint64_t, uint32_t> call_param(const Operand& operand) = 0;
  /// Marks a register as used after the instruction (by an operation in flight), so that its slot is its own.
  virtual void pin(const Operand& operand) = 0;
  /// Number of a register of a wgmma, by which its state is kept.
  virtual uint32_t wgmma_register(const Operand& operand) = 0;
  virtual const Program& program() const = 0;
};

/// Fills `instruction` (exec, slots, data) from `statement`; `mods` stands behind the registered name.
using Decode = void (*)(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction);

/// Registers a family: `name` is one or more leading components, e.g. "add", "tcgen05.mma". The longest match wins.
///   static const Family family("tcgen05.mma", decode_mma);
struct Family {
  Family(const char* name, Decode decode);
};

/// Throws Verdict(unsupported) quoting the statement.
[[noreturn]] void unsupported(const Statement& statement, const std::string& why);

}  // namespace emu
