// Control flow: bra, brx.idx, call, ret, exit, trap (PTX ISA 9.7.12).
#include "machine.h"

namespace emu {
namespace {

struct Target : Payload {
  uint32_t index = 0;
};

Step run_bra(Warp& w, const Instruction& in, uint32_t mask) { return w.branch(mask, in.as<Target>().index); }

Step run_bra_uni(Warp& w, const Instruction& in, uint32_t mask) {
  if (mask != w.fragment().mask)
    fail(Fault::divergence, "bra.uni is taken by lanes 0x%08x of the 0x%08x that execute it", mask, w.fragment().mask);
  return w.branch(mask, in.as<Target>().index);
}

void decode_bra(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  bool uniform = m.take("uni");
  d.operand_count(s, 1, 1);
  auto target = std::make_unique<Target>();
  d.label(s.operands[0], &target->index);
  in.exec = uniform ? run_bra_uni : run_bra;
  d.keep(in, std::move(target));
}

struct Table : Payload {
  std::vector<uint32_t> targets;
};

Step run_brx(Warp& w, const Instruction& in, uint32_t mask) {
  const Table& table = in.as<Table>();
  const uint32_t* index = w.r32(in.slot[0]);
  int first = __builtin_ctz(mask);
  uint32_t same = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    if (index[lane] >= table.targets.size())
      fail_lane(lane, Fault::illegal_operand, "brx.idx index %u of a table of %zu targets", index[lane], table.targets.size());
    if (index[lane] == index[first]) same |= 1u << lane;
  }
  // Lanes that go elsewhere stay at this instruction, as a group of their own, and branch next.
  if (same != mask || mask != w.fragment().mask) {
    Fragment& f = w.fragment();
    uint32_t pc = f.pc;
    uint32_t others = mask & ~same, not_taken = f.mask & ~mask;
    if (others) {
      Fragment rest = f;
      rest.mask = others;
      rest.blocked = false;
      f.mask &= ~others;
      w.fragments.push_back(std::move(rest));
    }
    if (not_taken) {
      Fragment fall = w.fragment();
      fall.mask = not_taken;
      fall.pc = pc + 1;
      fall.blocked = false;
      w.fragment().mask &= ~not_taken;
      w.fragments.push_back(std::move(fall));
    }
  }
  w.fragment().pc = table.targets[index[first]];
  return Step::jump;
}

void decode_brx(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  m.take("uni");
  d.operand_count(s, 2, 2);
  in.slot[0] = d.source(s.operands[0], Type::u32);
  auto table = std::make_unique<Table>();
  d.branch_table(s.operands[1], &table->targets);
  in.exec = run_brx;
  d.keep(in, std::move(table));
}

// ---------------------------------------------------------------- calls

/// Copies between local memory locations, lane by lane: arguments in, return values out.
struct Copy {
  uint64_t from, to;
  uint32_t bytes;
};

struct CallData : Payload {
  uint32_t function = 0;
  std::string name;
  std::vector<Copy> in, out;
};

void copy(Warp& w, const std::vector<Copy>& copies, uint32_t mask) {
  size_t stride = w.local.size() / kLanes;
  for (const Copy& c : copies)
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      uint8_t* base = w.local.data() + __builtin_ctz(rest) * stride;
      std::memmove(base + c.to, base + c.from, c.bytes);
    }
}

Step run_call(Warp& w, const Instruction& in, uint32_t mask) {
  const CallData& call = in.as<CallData>();
  if (call.function == 0xffffffffu) fail(Fault::unsupported, "call of '%s', which the module does not define", call.name.c_str());
  Fragment& f = w.fragment();
  for (uint32_t back : f.calls) {
    const auto& other = w.cta->cluster->grid->program->code[back].as<CallData>();
    if (other.function == call.function) fail(Fault::unsupported, "recursive call of '%s'", call.name.c_str());
  }
  copy(w, call.in, mask);
  uint32_t pc = f.pc;
  Step step = w.branch(mask, w.cta->cluster->grid->program->functions[call.function].first);
  Fragment& callee = w.fragment().mask == mask ? w.fragment() : w.fragments.back();
  callee.calls.push_back(pc);
  return step;
}

void decode_call(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  m.take("uni");
  auto call = std::make_unique<CallData>();
  // call [(return),] name [, (arguments)]
  size_t at = 0;
  const Operand* returns = nullptr;
  if (at < s.operands.size() && s.operands[at].kind == Operand::Kind::vector) returns = &s.operands[at++];
  if (at >= s.operands.size() || s.operands[at].kind != Operand::Kind::symbol) unsupported(s, "indirect calls are not known");
  const Operand& callee = s.operands[at++];
  call->name = callee.name;
  call->function = d.function(callee);
  const Operand* arguments = at < s.operands.size() ? &s.operands[at++] : nullptr;
  if (at != s.operands.size()) unsupported(s, "indirect calls are not known");
  if (call->function != 0xffffffffu) {
    auto bind = [&](const Operand* list, bool outwards) {
      auto formals = d.formals(call->function, outwards);
      size_t count = list ? list->items.size() : 0;
      if (count != formals.size()) unsupported(s, format("'%s' has %zu %s; the call passes %zu", call->name.c_str(), formals.size(), outwards ? "return values" : "parameters", count));
      for (size_t i = 0; i < count; ++i) {
        auto [offset, size] = d.call_param(list->items[i]);
        if (size != formals[i].second) unsupported(s, format("argument %zu of '%s' has %u bytes; expected %u", i, call->name.c_str(), size, formals[i].second));
        if (outwards) call->out.push_back({formals[i].first, offset, size});
        else call->in.push_back({offset, formals[i].first, size});
      }
    };
    bind(arguments, false);
    bind(returns, true);
  }
  in.exec = run_call;
  d.keep(in, std::move(call));
}

Step run_exit(Warp& w, const Instruction&, uint32_t mask) {
  w.exit(mask);
  return Step::exit;
}

Step run_ret(Warp& w, const Instruction& in, uint32_t mask) {
  if (w.fragment().calls.empty()) return run_exit(w, in, mask);
  uint32_t back = w.fragment().calls.back();
  copy(w, w.cta->cluster->grid->program->code[back].as<CallData>().out, mask);
  w.branch(mask, back + 1);
  Fragment& returning = w.fragment().mask == mask ? w.fragment() : w.fragments.back();
  returning.calls.pop_back();
  return Step::jump;
}

void decode_ret(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  m.take("uni");
  d.operand_count(s, 0, 0);
  in.exec = s.opcode[0] == "exit" ? run_exit : run_ret;
}

Step run_trap(Warp& w, const Instruction& in, uint32_t mask) {
  fail(Fault::trap, "the program executed %s (lanes 0x%08x)", in.flags ? "brkpt" : "trap", mask);
}

void decode_trap(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  d.operand_count(s, 0, 0);
  in.flags = s.opcode[0] == "brkpt";
  in.exec = run_trap;
}

Step run_nanosleep(Warp&, const Instruction&, uint32_t) { return Step::yield; }

void decode_nanosleep(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  if (m.need_type() != Type::u32) unsupported(s, "");
  d.operand_count(s, 1, 1);
  in.slot[0] = d.source(s.operands[0], Type::u32);
  in.exec = run_nanosleep;
}

Step run_nothing(Warp&, const Instruction&, uint32_t) { return Step::next; }

void decode_pmevent(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  m.take("mask");
  d.operand_count(s, 1, 1);
  d.immediate(s.operands[0]);
  in.exec = run_nothing;
}

const Family registered[] = {{"bra", decode_bra},   {"brx.idx", decode_brx}, {"call", decode_call},           {"ret", decode_ret},
                             {"exit", decode_ret},  {"trap", decode_trap},   {"brkpt", decode_trap},          {"nanosleep", decode_nanosleep},
                             {"pmevent", decode_pmevent}};

}  // namespace
}  // namespace emu
