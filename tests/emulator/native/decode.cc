// SyntaxModule -> Program: operands become slots, families decode instructions, slots are shared by liveness.
#include <algorithm>
#include <cstring>
#include <set>

#include "floats.h"
#include "machine.h"
#include "syntax.h"

namespace emu {
namespace {

std::unordered_map<std::string, Decode>& families() {
  static auto* map = new std::unordered_map<std::string, Decode>;
  return *map;
}

const std::unordered_map<std::string, Special>& specials() {
  static const auto* map = [] {
    auto* out = new std::unordered_map<std::string, Special>{
        {"%laneid", Special::laneid}, {"%warpid", Special::warpid}, {"%nwarpid", Special::nwarpid},
        {"%smid", Special::smid}, {"%nsmid", Special::nsmid}, {"%gridid", Special::gridid},
        {"%lanemask_eq", Special::lanemask_eq}, {"%lanemask_le", Special::lanemask_le},
        {"%lanemask_lt", Special::lanemask_lt}, {"%lanemask_ge", Special::lanemask_ge},
        {"%lanemask_gt", Special::lanemask_gt}, {"%cluster_ctarank", Special::cluster_ctarank},
        {"%cluster_nctarank", Special::cluster_nctarank}, {"%is_explicit_cluster", Special::is_explicit_cluster},
        {"%dynamic_smem_size", Special::dynamic_smem_size}, {"%total_smem_size", Special::total_smem_size},
        {"%aggr_smem_size", Special::aggr_smem_size}, {"%clock", Special::clock}, {"%clock_hi", Special::clock_hi},
        {"%clock64", Special::clock64}, {"%globaltimer", Special::globaltimer},
        {"%globaltimer_lo", Special::globaltimer_lo}, {"%globaltimer_hi", Special::globaltimer_hi}};
    const std::pair<const char*, Special> triples[] = {
        {"%tid", Special::tid_x}, {"%ntid", Special::ntid_x}, {"%ctaid", Special::ctaid_x}, {"%nctaid", Special::nctaid_x},
        {"%clusterid", Special::clusterid_x}, {"%nclusterid", Special::nclusterid_x},
        {"%cluster_ctaid", Special::cluster_ctaid_x}, {"%cluster_nctaid", Special::cluster_nctaid_x}};
    for (auto [name, first] : triples)
      for (int i = 0; i < 3; ++i)
        (*out)[std::string(name) + "." + "xyz"[i]] = static_cast<Special>(static_cast<uint32_t>(first) + i);
    return out;
  }();
  return *map;
}

uint64_t round_up(uint64_t value, uint64_t alignment) { return (value + alignment - 1) / alignment * alignment; }

/// Registers that an instruction reads and writes, by the parser's slots.
struct Usage {
  std::vector<Slot> reads, writes;
};

class DecoderImpl : public Decoder {
 public:
  DecoderImpl(Program& program, SyntaxModule& module) : program_(program), module_(module) {
    for (size_t i = 0; i < module.functions.size(); ++i) {
      const SyntaxFunction& f = module.functions[i];
      auto [it, fresh] = function_index_.emplace(f.info.name, i);
      if (!fresh && f.has_body) it->second = i;   // a definition after its prototype
    }
  }

  void run() {
    // Module-scope global and constant variables live in one image.
    uint64_t at = 0;
    for (Variable& variable : module_.variables) {
      if (variable.space != Space::global && variable.space != Space::constant) continue;
      at = round_up(at, std::max<uint64_t>(variable.alignment, 16));
      variable.offset = at;
      at += variable.size;
      if (at > (1ull << 32)) throw Verdict(Fault::unsupported, "module variables above 4 GiB");
    }
    program_.global_init.resize(at);
    for (const Variable& variable : module_.variables)
      if (!variable.init.empty()) std::memcpy(program_.global_init.data() + variable.offset, variable.init.data(), variable.init.size());
    program_.variables = module_.variables;
    program_.functions.resize(module_.functions.size());
    // Functions first: they share the beginning of every kernel's register file, shared and local memory.
    register_base_ = 0;
    shared_base_ = 0;
    for (size_t i = 0; i < module_.functions.size(); ++i) {
      const SyntaxFunction& f = module_.functions[i];
      if (f.info.is_entry) continue;
      for (const auto* list : {&f.info.params, &f.returns})
        for (const Parameter& parameter : *list)
          formals_[std::to_string(i) + ":" + parameter.name] = {take_local(parameter.size, parameter.alignment), parameter.size};
    }
    local_base_ = next_local_;
    for (bool entries : {false, true}) {
      for (size_t i = 0; i < module_.functions.size(); ++i) {
        if (module_.functions[i].info.is_entry != entries) continue;
        decode_function(i);
        if (!entries) {
          const Function& f = program_.functions[i];
          register_base_ = round_up(f.register_bytes, 512);
          shared_base_ = f.static_shared;
          local_base_ = f.local_bytes;
        }
      }
    }
    for (auto& [name, index] : opcode_index_) {
      if (program_.opcodes.size() <= index) program_.opcodes.resize(index + 1);
      program_.opcodes[index] = name;
    }
  }

  // ------------------------------------------------------------ Decoder
  Slot source(const Operand& operand, Type type, bool any_width) override {
    switch (operand.kind) {
      case Operand::Kind::reg:
        check_width(operand, type, any_width);
        if (operand.negated && operand.bits == 1) error("'!' is not known here");
        return use(operand.slot);
      case Operand::Kind::literal: return literal(operand, type);
      case Operand::Kind::symbol: return symbol(operand, type);
      default: error("operand is not a value");
    }
  }

  Slot destination(const Operand& operand, Type type, bool may_sink, bool any_width) override {
    if (operand.kind == Operand::Kind::sink) {
      if (!may_sink) error("'_' is not a destination of this instruction");
      return kNoSlot;
    }
    if (operand.kind != Operand::Kind::reg) error("destination is not a register");
    check_width(operand, type, any_width);
    return define(operand.slot);
  }

  Address address(const Operand& operand) override {
    if (operand.kind != Operand::Kind::address) error("operand is not an address");
    const Operand& base = operand.items[0];
    Address out;
    out.offset = operand.offset;
    if (base.kind == Operand::Kind::reg) {
      if (base.bits != 32 && base.bits != 64) error("an address register has 32 or 64 bits");
      out.base = use(base.slot);
      out.bits = base.bits;
    } else if (base.kind == Operand::Kind::literal) {
      out.base = literal(base, Type::b64);
    } else if (base.kind == Operand::Kind::symbol) {
      out.base = symbol(base, Type::b64);
    } else {
      error("operand is not an address");
    }
    return out;
  }

  Slot scratch(int bits) override {
    uint32_t size = bits == 1 ? 4 : bits <= 32 ? 128 : bits == 64 ? 256 : 512;
    return take_slot(size);
  }

  int64_t immediate(const Operand& operand) override {
    if (operand.kind != Operand::Kind::literal || operand.is_double || operand.is_single) error("operand must be an integer constant");
    return static_cast<int64_t>(operand.value);
  }

  void operand_count(const Statement& statement, size_t low, size_t high) override {
    size_t n = statement.operands.size();
    if (n < low || n > high)
      error(format("%s takes %zu%s operands; got %zu", statement.mnemonic.c_str(), low,
                   low == high ? "" : format(" to %zu", high).c_str(), n));
  }

  void keep(Instruction& instruction, std::unique_ptr<Payload> payload) override {
    instruction.data = payload.get();
    program_.payloads.push_back(std::move(payload));
  }

  void label(const Operand& operand, uint32_t* index) override {
    if (operand.kind != Operand::Kind::symbol) error("operand is not a label");
    fixups_.push_back({operand.name, statement_->scope, statement_->line, index});
    current_labels_.push_back(operand.name);
  }

  void branch_table(const Operand& operand, std::vector<uint32_t>* indices) override {
    for (int s = statement_->scope; s >= 0; s = syntax_->scopes[s].parent) {
      auto it = syntax_->scopes[s].tables.find(operand.name);
      if (it == syntax_->scopes[s].tables.end()) continue;
      indices->resize(it->second.size());
      for (size_t i = 0; i < it->second.size(); ++i) {
        fixups_.push_back({it->second[i], s, statement_->line, &(*indices)[i]});
        current_labels_.push_back(it->second[i]);
      }
      return;
    }
    error("'" + operand.name + "' is not a table of branch targets");
  }

  uint32_t function(const Operand& operand) override {
    auto it = function_index_.find(operand.name);
    if (operand.kind != Operand::Kind::symbol || it == function_index_.end() || !module_.functions[it->second].has_body)
      return 0xffffffffu;
    return static_cast<uint32_t>(it->second);
  }

  std::vector<std::pair<uint64_t, uint32_t>> formals(uint32_t index, bool returns) override {
    std::vector<std::pair<uint64_t, uint32_t>> out;
    const SyntaxFunction& f = module_.functions[index];
    for (const Parameter& parameter : returns ? f.returns : f.info.params)
      out.push_back(formals_.at(std::to_string(index) + ":" + parameter.name));
    return out;
  }

  std::pair<uint64_t, uint32_t> call_param(const Operand& operand) override {
    if (operand.kind == Operand::Kind::symbol) {
      for (int s = statement_->scope; s >= 0; s = syntax_->scopes[s].parent) {
        auto it = syntax_->scopes[s].variables.find(operand.name);
        if (it == syntax_->scopes[s].variables.end()) continue;
        const Variable& v = syntax_->variables[it->second];
        if (v.space != Space::param) break;
        auto [slot, fresh] = local_offsets_.try_emplace(local_key(it->second), 0);
        if (fresh) slot->second = take_local(v.size, v.alignment);
        return {slot->second, static_cast<uint32_t>(v.size)};
      }
    }
    error("a call's arguments must be .param variables of the caller");
  }

  void pin(const Operand& operand) override {
    if (operand.kind == Operand::Kind::reg) pinned_.insert(operand.slot);
  }

  uint32_t wgmma_register(const Operand& operand) override {
    auto [it, fresh] = wgmma_registers_.try_emplace(map(operand.slot), program_.wgmma_registers);
    if (fresh) ++program_.wgmma_registers;
    return it->second;
  }

  const Program& program() const override { return program_; }

 private:
  [[noreturn]] void error(const std::string& what, Fault fault = Fault::parse) const {
    Verdict verdict(fault, what);
    if (statement_) verdict.line = statement_->line;
    throw verdict;
  }

  void check_width(const Operand& operand, Type type, bool any_width) const {
    int bits = type_bits(type);
    if ((operand.bits == 1) != (bits == 1)) error("register '" + operand.name + "' is " + (operand.bits == 1 ? "" : "not ") + "a predicate");
    if (any_width || operand.bits == bits || bits == 8) return;
    error(format("register '%s' has %d bits, the instruction's type '.%s' has %d", operand.name.c_str(), operand.bits, type_name(type), bits));
  }

  // ------------------------------------------------------------ slots
  Slot map(Slot slot) const {
    if (!mapping_.empty()) {
      auto it = mapping_.find(slot);
      if (it != mapping_.end()) return static_cast<Slot>(register_base_) + it->second;
    }
    return static_cast<Slot>(register_base_) + slot;
  }
  Slot use(Slot slot) {
    usage_.reads.push_back(slot);
    return map(slot);
  }
  Slot define(Slot slot) {
    usage_.writes.push_back(slot);
    return map(slot);
  }
  Slot take_slot(uint32_t size) {
    next_slot_ = round_up(next_slot_, std::min<uint64_t>(size, 64));
    Slot out = static_cast<Slot>(next_slot_);
    next_slot_ += size;
    if (next_slot_ > 0x7fffffffu) error("too many registers");
    return out;
  }

  Slot constant(Constant::Kind kind, uint64_t value, int bits) {
    auto [it, fresh] = constants_.try_emplace({static_cast<int>(kind), value, bits}, 0);
    if (fresh) {
      it->second = take_slot(bits == 1 ? 4 : bits <= 32 ? 128 : bits == 64 ? 256 : 512);
      info_->constants.push_back({kind, it->second, bits, value});
    }
    return it->second;
  }

  Slot literal(const Operand& operand, Type type) {
    int bits = type_bits(type);
    uint64_t value = operand.value;
    bool is_float_literal = operand.is_double || operand.is_single;
    if (is_float_literal) {
      double wide = operand.is_double ? fp::as_double(value) : static_cast<double>(fp::as_float(static_cast<uint32_t>(value)));
      if (type == Type::f64 || (type == Type::b64 && operand.is_double)) {
        value = fp::as_bits64(wide);
      } else if (type == Type::f32 || type == Type::b32 || type == Type::tf32) {
        if (operand.is_double) value = fp::as_bits(static_cast<float>(wide));
      } else if (type == Type::f16 || type == Type::bf16) {
        value = fp::encode(wide, type == Type::f16 ? fp::kF16 : fp::kBf16, fp::Round::rn);
      } else {
        error("a floating-point constant cannot be of type '." + std::string(type_name(type)) + "'");
      }
    } else {
      if (is_float(type) && type != Type::f16 && type != Type::bf16 && type != Type::f16x2 && type != Type::bf16x2)
        error("an integer constant cannot be of type '." + std::string(type_name(type)) + "'");
      if (bits == 1) value = value != 0;
      else if (bits < 64) {
        int64_t as_signed = static_cast<int64_t>(value);
        if (as_signed > static_cast<int64_t>((1ull << bits) - 1) || as_signed < -(1ll << bits))
          error(format("constant %lld does not fit type '.%s'", static_cast<long long>(as_signed), type_name(type)));
        value &= (1ull << bits) - 1;
      }
    }
    return constant(Constant::Kind::literal, value, bits);
  }

  Slot symbol(const Operand& operand, Type type) {
    int bits = type_bits(type);
    if (auto it = specials().find(operand.name); it != specials().end()) {
      if (it->second >= Special::clock) error("'" + operand.name + "' can only be read by mov");
      return constant(Constant::Kind::special, static_cast<uint64_t>(it->second), bits);
    }
    if (operand.name[0] == '%' && operand.name.find('.') != std::string::npos)
      error("unknown special register '" + operand.name + "'", Fault::unsupported);
    if (bits != 32 && bits != 64) error("the address of '" + operand.name + "' has 32 or 64 bits");
    for (int s = statement_->scope; s >= 0; s = syntax_->scopes[s].parent) {
      auto it = syntax_->scopes[s].variables.find(operand.name);
      if (it != syntax_->scopes[s].variables.end())
        return variable(syntax_->variables[it->second], local_key(it->second), operand, bits);
    }
    for (const Parameter& parameter : syntax_->info.params) {
      if (parameter.name != operand.name) continue;
      if (syntax_->info.is_entry) return constant(Constant::Kind::param_symbol, parameter.offset + static_cast<uint64_t>(operand.offset), bits);
      return constant(Constant::Kind::local_symbol, kLocalWindow + formal(parameter.name) + operand.offset, bits);
    }
    for (const Parameter& parameter : syntax_->returns)
      if (parameter.name == operand.name)
        return constant(Constant::Kind::local_symbol, kLocalWindow + formal(parameter.name) + operand.offset, bits);
    for (size_t i = 0; i < module_.variables.size(); ++i)
      if (module_.variables[i].name == operand.name)
        return variable(module_.variables[i], "m" + std::to_string(i), operand, bits);
    error("unknown name '" + operand.name + "'");
  }

  std::string local_key(size_t index) const { return "f" + std::to_string(function_number_) + ":" + std::to_string(index); }

  Slot variable(const Variable& v, const std::string& key, const Operand& operand, int bits) {
    if (v.space == Space::global || v.space == Space::constant)
      return constant(Constant::Kind::global_symbol, v.offset + operand.offset, bits);
    if (v.space == Space::shared_cta) {
      if (v.dynamic_shared) {
        dynamic_alignment_ = std::max(dynamic_alignment_, v.alignment);
        return constant(Constant::Kind::dynamic_shared_symbol, static_cast<uint64_t>(operand.offset), bits);
      }
      auto [it, fresh] = shared_offsets_.try_emplace(key, 0);
      if (fresh) {
        it->second = round_up(next_shared_, v.alignment);
        next_shared_ = it->second + v.size;
        if (next_shared_ > kSharedMax) error("static shared memory above 227 KiB");
      }
      return constant(Constant::Kind::shared_symbol, kSharedBase + it->second + operand.offset, bits);
    }
    // .local: a plain offset of the local space; .param of a function body: reached through the local window
    auto [it, fresh] = local_offsets_.try_emplace(key, 0);
    if (fresh) it->second = take_local(v.size, v.alignment);
    return constant(Constant::Kind::local_symbol, (v.space == Space::param ? kLocalWindow : 0) + it->second + operand.offset, bits);
  }

  uint64_t take_local(uint64_t size, uint32_t alignment) {
    next_local_ = round_up(next_local_, alignment);
    uint64_t out = next_local_;
    next_local_ += size;
    if (next_local_ > (512u << 10)) error("local memory above 512 KiB a thread");
    return out;
  }

  /// Storage of a function's parameter or return value (a call copies into it).
  uint64_t formal(const std::string& name) { return formals_.at(std::to_string(function_number_) + ":" + name).first; }

  // ------------------------------------------------------------ functions
  void reset_pass() {
    next_slot_ = register_base_ + register_span_;
    next_shared_ = shared_base_;
    next_local_ = local_base_;
    dynamic_alignment_ = 16;
    constants_.clear();
    shared_offsets_ = function_shared_;
    local_offsets_.clear();
    fixups_.clear();
    info_->constants.clear();
  }

  void decode_function(size_t number) {
    function_number_ = number;
    syntax_ = &module_.functions[number];
    info_ = &program_.functions[number];
    *info_ = syntax_->info;
    mapping_.clear();
    pinned_.clear();
    if (!syntax_->has_body) {
      info_->register_bytes = static_cast<uint32_t>(register_base_);
      info_->static_shared = static_cast<uint32_t>(shared_base_);
      info_->local_bytes = static_cast<uint32_t>(local_base_);
      return;
    }
    // First pass: what each instruction reads and writes; then registers share slots; second pass: for good.
    register_span_ = syntax_->info.register_bytes;
    size_t payloads = program_.payloads.size(), first = program_.code.size();
    const uint32_t wgmma_registers = program_.wgmma_registers;
    std::vector<Usage> usages;
    std::vector<std::vector<std::string>> labels;
    decode_body(&usages, &labels);
    program_.code.resize(first);
    program_.source.resize(first);
    program_.payloads.resize(payloads);
    share_slots(usages, labels);
    loaded_.clear();
    for (size_t i = 0; i < syntax_->body.size(); ++i) {
      if (!is_tensor_load(syntax_->body[i])) continue;
      for (Slot slot : usages[i].writes) loaded_.insert(map(slot));
    }
    wgmma_registers_.clear();
    program_.wgmma_registers = wgmma_registers;   // the first pass numbered registers before they had their slots
    number_wgmma_registers();
    decode_body(nullptr, nullptr);

    info_->first = static_cast<uint32_t>(first);
    info_->count = static_cast<uint32_t>(program_.code.size() - first);
    for (const Fixup& fixup : fixups_) *fixup.index = static_cast<uint32_t>(first + find_label(fixup));
    info_->register_bytes = static_cast<uint32_t>(round_up(next_slot_, 64));
    info_->static_shared = static_cast<uint32_t>(next_shared_);
    info_->dynamic_alignment = dynamic_alignment_;
    info_->local_bytes = static_cast<uint32_t>(round_up(next_local_, 16));
    if (!info_->is_entry)
      for (auto& [key, offset] : shared_offsets_) function_shared_[key] = offset;
  }

  void decode_body(std::vector<Usage>* usages, std::vector<std::vector<std::string>>* labels) {
    reset_pass();
    for (const Statement& statement : syntax_->body) {
      statement_ = &statement;
      usage_ = Usage();
      current_labels_.clear();
      Instruction instruction;
      decode_statement(statement, instruction);
      if (!usages) {
        instruction.touches_loads = touches_loads(statement);
        instruction.wgmma_use = wgmma_use(statement);
      }
      program_.code.push_back(instruction);
      program_.source.emplace_back(statement.file, statement.source_line);
      if (usages) {
        usages->push_back(std::move(usage_));
        labels->push_back(current_labels_);
      }
    }
    // Falling off the end is a return; a label may stand there.
    Statement end;
    end.line = syntax_->body.empty() ? syntax_->line : syntax_->body.back().line;
    end.opcode = {"ret"};
    end.mnemonic = "ret";
    statement_ = &end;
    usage_ = Usage();
    Instruction instruction;
    decode_statement(end, instruction);
    program_.code.push_back(instruction);
    program_.source.emplace_back(0, 0);
    if (usages) {
      usages->emplace_back();
      labels->emplace_back();
    }
    statement_ = nullptr;
  }

  void decode_statement(const Statement& statement, Instruction& instruction) {
    try {
      instruction.line = statement.line;
      auto [it, fresh] = opcode_index_.try_emplace(statement.mnemonic, static_cast<uint32_t>(opcode_index_.size()));
      (void)fresh;
      instruction.opcode = static_cast<uint16_t>(it->second);
      if (it->second > 0xffff) error("too many different opcodes");
      if (statement.predicate.kind == Operand::Kind::reg) {
        instruction.predicate = use(statement.predicate.slot);
        instruction.predicate_negated = statement.predicate.negated;
      }
      size_t parts = std::min<size_t>(statement.opcode.size(), 6);
      for (; parts > 0; --parts) {
        std::string name = statement.opcode[0];
        for (size_t i = 1; i < parts; ++i) name += "." + statement.opcode[i];
        auto family = families().find(name);
        if (family == families().end()) continue;
        Modifiers modifiers(statement, parts);
        family->second(*this, statement, modifiers, instruction);
        modifiers.done();
        if (!instruction.exec) error("instruction has no meaning", Fault::internal);
        return;
      }
      error("unknown instruction '" + statement.mnemonic + "'", Fault::unsupported);
    } catch (Verdict& verdict) {
      verdict.line = statement.line;
      throw;
    }
  }

  struct Fixup {
    std::string name;
    int scope, line;
    uint32_t* index;
  };

  uint32_t find_label(const std::string& name, int scope, int line) const {
    for (int s = scope; s >= 0; s = syntax_->scopes[s].parent) {
      auto it = syntax_->scopes[s].labels.find(name);
      if (it != syntax_->scopes[s].labels.end()) return it->second;
    }
    Verdict verdict(Fault::parse, "unknown label '" + name + "'");
    verdict.line = line;
    throw verdict;
  }
  uint32_t find_label(const Fixup& fixup) const { return find_label(fixup.name, fixup.scope, fixup.line); }

  // ------------------------------------------------------------ sharing of slots
  /// Liveness of registers (a thread's control flow), then a greedy assignment in order of first use, by live intervals
  /// over the text. Registers of one size share; a register that is live into the entry (read before written, as far as
  /// control flow can tell) is live from the beginning.
  void share_slots(const std::vector<Usage>& usages, const std::vector<std::vector<std::string>>& labels) {
    size_t n = usages.size();
    // Registers, numbered.
    std::unordered_map<Slot, uint32_t> number;
    std::vector<Slot> slots;
    auto id_of = [&](Slot slot) {
      auto [it, fresh] = number.try_emplace(slot, static_cast<uint32_t>(slots.size()));
      if (fresh) slots.push_back(slot);
      return it->second;
    };
    for (const Usage& usage : usages) {
      for (Slot slot : usage.reads) id_of(slot);
      for (Slot slot : usage.writes) id_of(slot);
    }
    size_t registers = slots.size();
    if (registers == 0) {
      register_span_ = 0;
      return;
    }
    // Basic blocks.
    std::vector<char> leader(n + 1, 0);
    std::vector<std::vector<uint32_t>> targets(n);
    leader[0] = 1;
    for (size_t i = 0; i < n; ++i) {
      for (const std::string& name : labels[i]) {
        int scope = syntax_->body[i].scope;
        uint32_t target = find_label(name, scope, syntax_->body[i].line);
        targets[i].push_back(target);
        leader[target] = 1;
      }
      if (!labels[i].empty() || ends_block(i)) leader[i + 1] = 1;
    }
    std::vector<uint32_t> block_of(n), begin;
    for (size_t i = 0; i < n; ++i) {
      if (leader[i]) begin.push_back(static_cast<uint32_t>(i));
      block_of[i] = static_cast<uint32_t>(begin.size() - 1);
    }
    size_t blocks = begin.size();
    begin.push_back(static_cast<uint32_t>(n));
    std::vector<std::vector<uint32_t>> successors(blocks);
    for (size_t b = 0; b < blocks; ++b) {
      size_t last = begin[b + 1] - 1;
      for (uint32_t target : targets[last]) successors[b].push_back(block_of[target]);
      if (falls_through(last) && b + 1 < blocks) successors[b].push_back(static_cast<uint32_t>(b + 1));
    }
    // Per-block upward-exposed reads and kills (unpredicated writes only), then live-in by iteration.
    size_t words = (registers + 63) / 64;
    std::vector<uint64_t> gen(blocks * words), kill(blocks * words), in(blocks * words);
    auto set = [&](std::vector<uint64_t>& bits, size_t b, uint32_t r) { bits[b * words + r / 64] |= 1ull << (r % 64); };
    auto get = [&](const std::vector<uint64_t>& bits, size_t b, uint32_t r) { return bits[b * words + r / 64] >> (r % 64) & 1; };
    for (size_t b = 0; b < blocks; ++b) {
      for (size_t i = begin[b]; i < begin[b + 1]; ++i) {
        for (Slot slot : usages[i].reads) {
          uint32_t r = number[slot];
          if (!get(kill, b, r)) set(gen, b, r);
        }
        bool predicated = i < syntax_->body.size() && syntax_->body[i].predicate.kind == Operand::Kind::reg;
        if (!predicated)
          for (Slot slot : usages[i].writes) set(kill, b, number[slot]);
      }
    }
    std::vector<uint64_t> out(words);
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t b = blocks; b-- > 0;) {
        std::fill(out.begin(), out.end(), 0);
        for (uint32_t s : successors[b])
          for (size_t w = 0; w < words; ++w) out[w] |= in[s * words + w];
        for (size_t w = 0; w < words; ++w) {
          uint64_t next = gen[b * words + w] | (out[w] & ~kill[b * words + w]);
          if (next != in[b * words + w]) {
            in[b * words + w] = next;
            changed = true;
          }
        }
      }
    }
    // Live intervals over the text.
    std::vector<uint32_t> from(registers, 0xffffffffu), to(registers, 0);
    auto touch = [&](uint32_t r, uint32_t at) {
      from[r] = std::min(from[r], at);
      to[r] = std::max(to[r], at);
    };
    for (size_t b = 0; b < blocks; ++b) {
      std::fill(out.begin(), out.end(), 0);
      for (uint32_t s : successors[b])
        for (size_t w = 0; w < words; ++w) out[w] |= in[s * words + w];
      for (size_t w = 0; w < words; ++w) {
        for (uint64_t bits = in[b * words + w]; bits; bits &= bits - 1) touch(static_cast<uint32_t>(w * 64 + __builtin_ctzll(bits)), begin[b]);
        for (uint64_t bits = out[w]; bits; bits &= bits - 1) touch(static_cast<uint32_t>(w * 64 + __builtin_ctzll(bits)), begin[b + 1]);
      }
      for (uint32_t i = begin[b]; i < begin[b + 1]; ++i) {
        for (Slot slot : usages[i].reads) touch(number[slot], i);
        for (Slot slot : usages[i].writes) {
          touch(number[slot], i);
          touch(number[slot], i + 1);
        }
      }
    }
    for (Slot slot : pinned_) {
      auto it = number.find(slot);
      if (it == number.end()) continue;
      from[it->second] = 0;
      to[it->second] = static_cast<uint32_t>(n);
    }
    // Greedy assignment.
    std::vector<uint32_t> order(registers);
    for (uint32_t r = 0; r < registers; ++r) order[r] = r;
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return from[a] != from[b] ? from[a] < from[b] : slots[a] < slots[b]; });
    std::unordered_map<Slot, uint32_t> sizes = register_sizes();
    std::map<uint32_t, std::vector<Slot>> free_slots;
    std::multimap<uint32_t, std::pair<uint32_t, Slot>> active;   // end -> (size, slot)
    uint64_t top = 0;
    for (uint32_t r : order) {
      while (!active.empty() && active.begin()->first < from[r]) {
        free_slots[active.begin()->second.first].push_back(active.begin()->second.second);
        active.erase(active.begin());
      }
      uint32_t size = sizes.at(slots[r]);
      std::vector<Slot>& pool = free_slots[size];
      Slot slot;
      if (!pool.empty()) {
        slot = pool.back();
        pool.pop_back();
      } else {
        top = round_up(top, std::min<uint64_t>(size, 64));
        slot = static_cast<Slot>(top);
        top += size;
      }
      mapping_[slots[r]] = slot;
      active.emplace(to[r], std::pair{size, slot});
    }
    register_span_ = static_cast<uint32_t>(round_up(top, 64));
  }

  std::unordered_map<Slot, uint32_t> register_sizes() const {
    std::unordered_map<Slot, uint32_t> out;
    for (const SyntaxScope& scope : syntax_->scopes) {
      for (const auto& [name, reg] : scope.registers) out[reg.slot] = slot_bytes(reg.type);
      for (const auto& [name, family] : scope.families)
        for (uint32_t i = 0; i < family.count; ++i) out[family.first + i * slot_bytes(family.type)] = slot_bytes(family.type);
    }
    return out;
  }

  static bool is_tensor_load(const Statement& statement) {
    return statement.opcode.size() > 1 && statement.opcode[0] == "tcgen05" && statement.opcode[1] == "ld";
  }
  /// tcgen05.ld may fill its registers late; whoever else uses their slots must let it land first. (Loads look after
  /// their own destinations, so that several can be in flight.)
  bool touches_loads(const Statement& statement) const {
    if (loaded_.empty()) return false;
    auto loaded = [&](Slot slot) { return loaded_.count(map(slot)) != 0; };
    return std::any_of(usage_.reads.begin(), usage_.reads.end(), loaded) ||
           (!is_tensor_load(statement) && std::any_of(usage_.writes.begin(), usage_.writes.end(), loaded));
  }

  static bool is_wgmma(const Statement& statement) {
    return statement.opcode.size() > 1 && statement.opcode[0] == "wgmma" && statement.opcode[1] == "mma_async";
  }
  /// Numbers the registers of the function's wgmma, which must be known before the instructions that touch them.
  void number_wgmma_registers() {
    for (const Statement& statement : syntax_->body) {
      if (!is_wgmma(statement)) continue;
      for (const Operand& operand : statement.operands)
        if (operand.kind == Operand::Kind::vector)
          for (const Operand& item : operand.items)
            if (item.kind == Operand::Kind::reg) wgmma_register(item);
    }
  }
  uint32_t wgmma_use(const Statement& statement) {
    if (wgmma_registers_.empty() || is_wgmma(statement)) return 0;
    WgmmaUse use;
    auto add = [&](const std::vector<Slot>& slots) {
      for (Slot slot : slots) {
        auto it = wgmma_registers_.find(map(slot));
        if (it != wgmma_registers_.end()) use.registers.push_back(it->second);
      }
    };
    add(usage_.reads);
    use.reads = use.registers.size();
    add(usage_.writes);
    if (use.registers.empty()) return 0;
    program_.wgmma_uses.push_back(std::move(use));
    return static_cast<uint32_t>(program_.wgmma_uses.size() - 1);
  }

  const std::string& root(size_t i) const {
    static const std::string ret = "ret";
    return i < syntax_->body.size() ? syntax_->body[i].opcode[0] : ret;
  }
  bool ends_block(size_t i) const {
    const std::string& op = root(i);
    return op == "ret" || op == "exit" || op == "trap" || op == "bra" || op == "brx";
  }
  bool falls_through(size_t i) const {
    if (i >= syntax_->body.size()) return false;
    if (syntax_->body[i].predicate.kind == Operand::Kind::reg) return true;
    return !ends_block(i) || root(i) == "trap";
  }

  Program& program_;
  SyntaxModule& module_;
  std::unordered_map<std::string, size_t> function_index_;
  std::unordered_map<std::string, uint32_t> opcode_index_;
  std::unordered_map<std::string, uint64_t> function_shared_;
  std::unordered_map<std::string, std::pair<uint64_t, uint32_t>> formals_;

  size_t function_number_ = 0;
  SyntaxFunction* syntax_ = nullptr;
  Function* info_ = nullptr;
  const Statement* statement_ = nullptr;
  uint64_t register_base_ = 0, shared_base_ = 0, local_base_ = 0;
  uint32_t register_span_ = 0;
  uint64_t next_slot_ = 0, next_shared_ = 0, next_local_ = 0;
  uint32_t dynamic_alignment_ = 16;
  std::map<std::tuple<int, uint64_t, int>, Slot> constants_;
  std::unordered_map<std::string, uint64_t> shared_offsets_, local_offsets_;
  std::vector<Fixup> fixups_;
  std::unordered_map<Slot, Slot> mapping_;
  std::unordered_map<Slot, uint32_t> wgmma_registers_;   // by slot in the register file
  std::set<Slot> pinned_;
  std::set<Slot> loaded_;   // slots that a tcgen05.ld of the function fills
  Usage usage_;
  std::vector<std::string> current_labels_;
};

}  // namespace

Family::Family(const char* name, Decode decode) {
  if (!families().emplace(name, decode).second) {
    std::fprintf(stderr, "opcode family %s registered twice\n", name);
    std::abort();
  }
}

void unsupported(const Statement& statement, const std::string& why) {
  Verdict verdict(Fault::unsupported, why.empty() ? "unsupported form of '" + statement.mnemonic + "'" : why);
  verdict.line = statement.line;
  throw verdict;
}

// ---------------------------------------------------------------- modifiers

void Modifiers::skip_taken() {
  while (std::find(taken_.begin(), taken_.end(), next_) != taken_.end()) ++next_;
}

bool Modifiers::take(const char* name) {
  skip_taken();
  if (next_ >= statement_.opcode.size() || statement_.opcode[next_] != name) return false;
  ++next_;
  return true;
}

int Modifiers::take_one(std::initializer_list<const char*> names, int otherwise) {
  int index = 0;
  for (const char* name : names) {
    if (take(name)) return index;
    ++index;
  }
  if (otherwise == -2) {
    std::string list;
    for (const char* name : names) list += std::string(list.empty() ? "." : ", .") + name;
    unsupported(statement_, "'" + statement_.mnemonic + "' needs one of " + list);
  }
  return otherwise;
}

bool Modifiers::take_anywhere(const char* name) {
  for (size_t i = next_; i < statement_.opcode.size(); ++i) {
    if (statement_.opcode[i] == name && std::find(taken_.begin(), taken_.end(), i) == taken_.end()) {
      taken_.push_back(i);
      return true;
    }
  }
  return false;
}

Type Modifiers::take_type() {
  skip_taken();
  if (next_ >= statement_.opcode.size()) return Type::none;
  Type type = parse_type(statement_.opcode[next_]);
  if (type != Type::none) ++next_;
  return type;
}

Type Modifiers::need_type() {
  Type type = take_type();
  if (type == Type::none) {
    done();
    unsupported(statement_, "'" + statement_.mnemonic + "' lacks a type");
  }
  return type;
}

std::string Modifiers::peek() const {
  Modifiers copy = *this;
  copy.skip_taken();
  return copy.next_ < statement_.opcode.size() ? statement_.opcode[copy.next_] : "";
}

void Modifiers::done() const {
  std::string left = peek();
  if (!left.empty()) unsupported(statement_, "unknown modifier '." + left + "' of '" + statement_.mnemonic + "'");
}

// ---------------------------------------------------------------- program

const Function* Program::entry(const std::string& name) const {
  const Function* found = nullptr;
  for (const Function& function : functions) {
    if (!function.is_entry || function.count == 0) continue;
    if (!name.empty() && function.name == name) return &function;
    if (name.empty()) {
      if (found) return nullptr;
      found = &function;
    }
  }
  return found;
}

std::unique_ptr<Program> load_program(const std::string& text) {
  auto program = std::make_unique<Program>();
  size_t begin = 0;
  while (begin <= text.size()) {
    size_t end = text.find('\n', begin);
    if (end == std::string::npos) end = text.size();
    program->lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  try {
    SyntaxModule module = parse_module(text, program->lines);
    program->target = module.target;
    program->files = module.files;
    DecoderImpl(*program, module).run();
  } catch (Verdict& verdict) {
    if (verdict.line >= 1 && verdict.line <= static_cast<int>(program->lines.size())) verdict.text = program->lines[verdict.line - 1];
    throw;
  }
  return program;
}

}  // namespace emu
