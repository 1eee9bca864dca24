#include "report.h"

#include <algorithm>
#include <cstdio>

#include "grid.h"
#include "wgmma.h"

namespace emu {

std::string json_string(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\t': out += "\\t"; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f) out += format("\\u%04x", static_cast<unsigned char>(c));
        else out += c;
    }
  }
  return out + "\"";
}

namespace {

std::string trimmed(const std::string& text) {
  size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string::npos) return "";
  size_t end = text.find_last_not_of(" \t\r");
  return text.substr(begin, end - begin + 1);
}

std::string text_of(const Program& program, int line) {
  return line >= 1 && line <= static_cast<int>(program.lines.size()) ? trimmed(program.lines[line - 1]) : "";
}

/// "kernel.py:123" where .loc says so, else "".
std::string source_of(const Program& program, uint32_t pc) {
  auto [file, line] = program.source[pc];
  if (!line) return "";
  auto it = program.files.find(file);
  std::string name = it == program.files.end() ? "file " + std::to_string(file) : it->second;
  return name + ":" + std::to_string(line);
}

std::string triple(const std::array<uint32_t, 3>& v) { return format("(%u,%u,%u)", v[0], v[1], v[2]); }

std::string warp_place(const Warp& warp) {
  return format("CTA %s rank %u warp %d", triple(warp.cta->id).c_str(), warp.cta->rank, warp.index);
}

struct WaitRow {
  std::string text, json;
  bool bytes_never_match = false;
};

WaitRow describe_wait(const Cluster& cluster, const Warp& warp, const Fragment& f) {
  const Program& program = *cluster.grid->program;
  const Instruction& in = program.code[f.pc];
  WaitRow out;
  std::string what, extra;
  const Wait& wait = f.wait;
  if (!f.blocked) {
    what = "nothing: it polls";
  } else if (wait.kind == Wait::Kind::mbarrier) {
    uint32_t rank = wait.object >> 24, offset = wait.object & 0xffffff;
    const auto& all = cluster.ctas[rank]->barriers.all();
    auto it = all.find(offset);
    if (it == all.end()) {
      what = format("mbarrier at shared 0x%x, which no longer exists", wait.object);
    } else {
      const Mbarrier& b = it->second;
      what = format("mbarrier at shared 0x%x, parity %u: phase %llu, %u of %u arrivals pending, tx bytes %lld", wait.object, wait.parity,
                    static_cast<unsigned long long>(b.phase), b.pending, b.expected, static_cast<long long>(b.tx));
      extra = format(", \"barrier\": {\"address\": %u, \"parity\": %u, \"phase\": %llu, \"pending\": %u, \"expected\": %u, \"tx_bytes\": %lld, \"init_line\": %d}",
                     wait.object, wait.parity, static_cast<unsigned long long>(b.phase), b.pending, b.expected, static_cast<long long>(b.tx), b.init_line);
      out.bytes_never_match = b.tx < 0 && cluster.async.empty();
    }
  } else if (wait.kind == Wait::Kind::named_barrier) {
    const NamedBarrier& b = warp.cta->named[wait.object & 15];
    what = format("named barrier %u: %u of %u threads have arrived", wait.object, b.arrived, b.expected);
    extra = format(", \"barrier\": {\"number\": %u, \"arrived\": %u, \"expected\": %u}", wait.object, b.arrived, b.expected);
  } else if (wait.kind == Wait::Kind::cluster_barrier) {
    what = format("barrier.cluster: %u of %u threads have arrived or ended", cluster.barrier.arrived + cluster.barrier.exited, cluster.threads);
  } else if (wait.kind == Wait::Kind::registers) {
    what = format("%s: %lld registers free in the CTA's pool", wait.what, static_cast<long long>(warp.cta->register_pool));
  } else {
    what = wait.what;
  }
  std::string source = source_of(program, f.pc);
  std::string text = text_of(program, in.line);
  out.text = format("  %s lanes 0x%08x at %sline %d: %s\n    waits for %s\n", warp_place(warp).c_str(), f.mask,
                    source.empty() ? "" : (source + ", ").c_str(), in.line, text.c_str(), what.c_str());
  out.json = format("{\"cta\": [%u, %u, %u], \"rank\": %u, \"warp\": %d, \"lanes\": %u, \"line\": %d, \"text\": %s, \"source\": %s, \"waits_for\": %s%s}",
                    warp.cta->id[0], warp.cta->id[1], warp.cta->id[2], warp.cta->rank, warp.index, f.mask, in.line,
                    json_string(text).c_str(), json_string(source).c_str(), json_string(what).c_str(), extra.c_str());
  return out;
}

}  // namespace

void place(Verdict& verdict, const Warp& warp, uint32_t pc) {
  if (verdict.placed) return;   // raised by an operation that landed inside this instruction
  verdict.placed = true;
  const Program& program = *warp.cta->cluster->grid->program;
  if (!verdict.line) verdict.line = program.code[pc].line;
  if (verdict.text.empty()) verdict.text = text_of(program, verdict.line);
  std::string where = warp_place(warp);
  verdict.where = verdict.where.empty() ? where : where + " " + verdict.where;
  std::string source = source_of(program, pc);
  if (!source.empty()) verdict.where += " (" + source + ")";
}

void place(Verdict& verdict, const Cluster& cluster, const AsyncOp& op) {
  if (verdict.placed) return;
  verdict.placed = true;
  if (!verdict.line) verdict.line = op.line;
  verdict.text = text_of(*cluster.grid->program, verdict.line);
  const Cta& cta = *cluster.ctas[op.agent.cta_rank];
  verdict.where = format("CTA %s rank %u warp %u lane %u, which issued: %s", triple(cta.id).c_str(), cta.rank, op.agent.warp, op.agent.lane,
                         op.describe().c_str());
}

Verdict deadlock(const std::vector<Cluster*>& clusters) {
  std::string text, json;
  bool bytes = false;
  int waiting = 0, line = 0;
  std::string where;
  for (Cluster* cluster : clusters) {
    for (const auto& cta : cluster->ctas)
      for (const auto& warp : cta->warps)
        for (const Fragment& f : warp->fragments) {
          WaitRow row = describe_wait(*cluster, *warp, f);
          text += row.text;
          json += (json.empty() ? "" : ", ") + row.json;
          bytes |= row.bytes_never_match;
          ++waiting;
          if (!line || (row.bytes_never_match && !bytes)) {
            line = cluster->grid->program->code[f.pc].line;
            where = warp_place(*warp);
          }
        }
    for (const AsyncOp* op : cluster->async.in_flight()) text += "  in flight: " + op->describe() + "\n";
  }
  Verdict verdict(bytes ? Fault::byte_count : Fault::deadlock,
                  format("%s: %d thread groups wait and nothing can make progress\n%s",
                         bytes ? "transaction bytes that can never match" : "deadlock", waiting, text.c_str()));
  verdict.line = line;
  verdict.where = where;
  if (line) verdict.text = text_of(*clusters[0]->grid->program, line);
  verdict.detail = "[" + json + "]";
  return verdict;
}

void check_cta_end(Cluster& cluster, Cta& cta) {
  std::string who = format("CTA %s rank %u", triple(cta.id).c_str(), cta.rank);
  auto raise = [&](Fault fault, int line, const std::string& message) {
    Verdict verdict(fault, who + " ends " + message);
    verdict.line = line;
    verdict.text = text_of(*cluster.grid->program, line);
    verdict.where = who;
    throw verdict;
  };
  try {
    check_wgmma_end(cta);
  } catch (const Verdict& verdict) {
    raise(verdict.fault, verdict.line, verdict.message);
  }
  for (const AsyncOp* op : cluster.async.in_flight())
    if (op->needs_cta(cta.rank)) raise(Fault::in_flight, op->line, "while an operation that uses its shared memory or barriers is in flight: " + op->describe());
  for (const auto& [offset, barrier] : cta.barriers.all())
    if (barrier.tx != 0)
      raise(Fault::byte_count, barrier.init_line,
            format("with tx bytes %lld on the mbarrier at shared offset 0x%x (phase %llu): bytes expected and bytes moved differ",
                   static_cast<long long>(barrier.tx), offset, static_cast<unsigned long long>(barrier.phase)));
  for (const auto& allocation : cta.tensor.allocations)
    raise(Fault::tensor_memory, allocation.line, format("with %u Tensor Memory columns at column %u still allocated", allocation.count, allocation.column));
  for (size_t w = 0; w < cta.warps.size(); ++w) {
    const Warp& first = *cta.warps[w / 4 * 4];
    if (cta.warps[w]->maxnreg_history != first.maxnreg_history)
      raise(Fault::register_pool, 0, format("though warps %zu and %zu of one warpgroup executed different setmaxnreg", w / 4 * 4, w));
  }
  for (int b = 0; b < 16; ++b)
    if (cta.named[b].arrived)
      raise(Fault::named_barrier, 0, format("with %u of %u threads arrived at named barrier %d, which never completed", cta.named[b].arrived, cta.named[b].expected, b));
}

void record(Cluster& cluster, int cta, int warp, uint8_t kind, uint64_t begin, uint64_t end, int line) {
  if (!cluster.trace.empty()) {
    Interval& last = cluster.trace.back();
    if (last.cta == cta && last.warp == warp && last.kind == kind && last.line == line && last.end == begin) {
      last.end = end;
      return;
    }
  }
  cluster.trace.push_back({cta, warp, begin, end, line, kind});
}

void Totals::add(const Cluster& cluster) {
  instructions += cluster.clock;
  tma_bytes_in += cluster.tma_bytes_in;
  tma_bytes_out += cluster.tma_bytes_out;
  for (const auto& [shape, count] : cluster.mma_counts) mma[shape] += count;
  for (const auto& cta : cluster.ctas) {
    peak_tensor_columns = std::max(peak_tensor_columns, cta->tensor.peak);
    for (const auto& [offset, barrier] : cta->barriers.all()) {
      barrier_waits += barrier.waits;
      barrier_stalls += barrier.stalls;
    }
    for (const auto& warp : cta->warps) {
      if (executed.size() < warp->executed.size()) executed.resize(warp->executed.size());
      for (size_t i = 0; i < warp->executed.size(); ++i) executed[i] += warp->executed[i];
      if (warp_instructions.size() <= static_cast<size_t>(warp->index)) warp_instructions.resize(warp->index + 1);
      warp_instructions[warp->index] += warp->instructions;
    }
  }
  for (const Interval& row : cluster.trace) trace.emplace_back(cluster.index, row);
}

std::string Totals::json(const Grid& grid) const {
  const Program& program = *grid.program;
  std::map<std::string, uint64_t> by_opcode;
  for (size_t i = 0; i < executed.size(); ++i)
    if (executed[i]) by_opcode[program.opcodes[program.code[i].opcode]] += executed[i];
  std::string out = format("{\"entry\": %s, \"instructions\": %llu, \"clusters\": %llu", json_string(grid.entry->name).c_str(),
                           static_cast<unsigned long long>(instructions), static_cast<unsigned long long>(grid.clusters));
  auto map = [&](const char* name, const std::map<std::string, uint64_t>& values) {
    out += format(", \"%s\": {", name);
    bool first = true;
    for (const auto& [key, value] : values) {
      out += format("%s%s: %llu", first ? "" : ", ", json_string(key).c_str(), static_cast<unsigned long long>(value));
      first = false;
    }
    out += "}";
  };
  map("by_opcode", by_opcode);
  map("mma", mma);
  map("events", events);
  out += ", \"by_warp\": [";
  for (size_t i = 0; i < warp_instructions.size(); ++i)
    out += format("%s%llu", i ? ", " : "", static_cast<unsigned long long>(warp_instructions[i]));
  out += format("], \"tma_bytes_in\": %llu, \"tma_bytes_out\": %llu, \"barrier_waits\": %llu, \"barrier_stalls\": %llu",
                static_cast<unsigned long long>(tma_bytes_in), static_cast<unsigned long long>(tma_bytes_out),
                static_cast<unsigned long long>(barrier_waits), static_cast<unsigned long long>(barrier_stalls));
  out += format(", \"peak_tensor_columns\": %u, \"shared_bytes\": %u, \"registers\": %u", peak_tensor_columns, grid.shared_end - kSharedBase,
                grid.register_count);
  out += ", \"lines\": {";
  bool first = true;
  std::map<int, uint64_t> lines;
  for (size_t i = 0; i < executed.size(); ++i)
    if (executed[i]) lines[program.code[i].line] += executed[i];
  for (const auto& [line, count] : lines) {
    out += format("%s\"%d\": %llu", first ? "" : ", ", line, static_cast<unsigned long long>(count));
    first = false;
  }
  out += "}, \"trace\": [";
  first = true;
  for (const auto& [cluster, row] : trace) {
    out += format("%s[%llu, %d, %d, %llu, %llu, %d, %d]", first ? "" : ", ", static_cast<unsigned long long>(cluster), row.cta, row.warp,
                  static_cast<unsigned long long>(row.begin), static_cast<unsigned long long>(row.end), row.line, row.kind);
    first = false;
  }
  return out + "]}";
}

}  // namespace emu
