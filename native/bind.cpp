// The Python binding of the native core: the only file that knows nanobind. No logic beyond conversion.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>

#include "gguf_scan.h"
#include "isa.h"
#include "pool.h"
#include "probe.h"
#include "program.h"
#include "rules.h"
#include "sampler.h"
#include "spm.h"
#include "weights.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;

template <typename T>
nb::object to_numpy(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;
using Ints = nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Masks = nb::ndarray<std::uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Sums = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using RawBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ViewTuple = std::tuple<std::int64_t, std::int64_t, std::int32_t, bool>;
using SegmentTuple = std::tuple<yeoul::PackedWeight*, std::optional<Floats>>;

yeoul::View to_view(const ViewTuple& v) { return {std::get<0>(v), std::get<1>(v), std::get<2>(v), std::get<3>(v)}; }

std::vector<float> to_vector(const Floats& values) { return {values.data(), values.data() + values.size()}; }

// The program keeps the packed weight alive, as `keep` does for what is no direct argument.
yeoul::Segment to_segment(const SegmentTuple& segment, std::vector<nb::object>& keep) {
  keep.push_back(nb::find(std::get<0>(segment)));
  yeoul::Segment out{std::get<0>(segment), {}};
  if (const auto& bias = std::get<1>(segment)) {
    out.bias = to_vector(*bias);
    out.bias.resize(static_cast<std::size_t>(out.weight->panels() * yeoul::kPanel));
  }
  return out;
}

yeoul::KVType to_kv_type(const std::string& name) {
  using yeoul::KVType;
  const std::pair<const char*, KVType> types[] = {{"f16", KVType::f16},   {"f32", KVType::f32},           {"bf16", KVType::bf16},
                                                  {"int8", KVType::int8}, {"fp8_e4m3", KVType::fp8_e4m3}, {"fp8_e5m2", KVType::fp8_e5m2}};
  for (const auto& [known, type] : types)
    if (name == known) return type;
  throw std::invalid_argument("the native executor has no KV dtype '" + name + "'");
}

// The arrays of a step, allocated by Python once and filled in place; sizes are those of the executor's limits.
struct Buffers {
  Ints tokens, positions;
  Table rows;  // [rows, 4]: slot, begin, tokens, position
  Ints gathered;
  Table outputs;  // [R, 4]: RowOutput
  Masks masks;
  Sums pooled;
  RawBytes sampling, results, row_nan;
};

// A program and what its memory depends on.
class BoundProgram {
 public:
  BoundProgram(yeoul::Pool& pool, const std::string& isa, std::size_t arena_bytes, std::vector<yeoul::KVGroup> groups)
      : program(pool, yeoul::kernels_for(isa), arena_bytes, std::move(groups)) {}

  void set_rules(std::size_t slot, std::shared_ptr<yeoul::LogitRules> rules) {
    if (slot >= rules_.size()) throw std::invalid_argument("no such slot: call bind first");
    rule_pointers_[slot] = rules.get();
    rules_[slot] = std::move(rules);
  }

  void bind(Buffers given) {
    buffers.emplace(std::move(given));
    rules_.resize(buffers->pooled.shape(0));
    rule_pointers_.resize(rules_.size());
  }

  // Everything but the first `num_logits` of the gathered tokens is pooled. Raises for an output that points nowhere.
  void run(std::int32_t tokens, std::int32_t rows, std::int32_t gathered, std::int32_t num_logits, std::optional<Matrix> logits, std::size_t first, std::size_t last) {
    if (!buffers) throw std::invalid_argument("the program has no buffers: call bind first");
    if (tokens < 0 || rows < 0 || gathered < 0 || num_logits < 0 || num_logits > gathered || static_cast<std::size_t>(gathered) > buffers->outputs.shape(0) || static_cast<std::size_t>(tokens) > buffers->tokens.size() ||
        static_cast<std::size_t>(rows) > buffers->rows.shape(0) || static_cast<std::size_t>(gathered) > buffers->gathered.size() ||
        (logits && static_cast<std::size_t>(gathered) > logits->shape(0)))
      throw std::invalid_argument("the step does not fit the program's buffers");
    yeoul::Frame f;
    f.num_tokens = tokens;
    f.num_rows = rows;
    f.num_gathered = gathered;
    f.tokens = buffers->tokens.data();
    f.positions = buffers->positions.data();
    f.rows = reinterpret_cast<const yeoul::StepRow*>(buffers->rows.data());
    f.gathered = buffers->gathered.data();
    f.num_logits = num_logits;
    f.outputs = reinterpret_cast<const yeoul::RowOutput*>(buffers->outputs.data());
    if (!logits) check_outputs(f);
    f.rules = rule_pointers_.data();
    f.masks = buffers->masks.data();
    f.mask_words = static_cast<std::int64_t>(buffers->masks.shape(1));
    f.pooled = buffers->pooled.data();
    f.sampling = reinterpret_cast<const yeoul::SampleParams*>(buffers->sampling.data());
    f.row_nan = buffers->row_nan.data();
    if (logits) f.logits = logits->data();
    else f.results = reinterpret_cast<yeoul::SampleResult*>(buffers->results.data());
    nb::gil_scoped_release unlocked;
    program.run(f, first, last);
  }

  yeoul::Program program;
  std::optional<Buffers> buffers;
  std::vector<nb::object> keep;  // arrays and weights that instructions point into

 private:
  void check_outputs(const yeoul::Frame& f) const {
    for (std::int32_t i = 0; i < f.num_gathered; ++i) {
      const yeoul::RowOutput& o = f.outputs[i];
      if (o.slot < 0 || static_cast<std::size_t>(o.slot) >= rules_.size() || o.mask >= static_cast<std::int64_t>(buffers->masks.shape(0)))
        throw std::invalid_argument("an output of the step points to no slot or mask");
    }
  }

  std::vector<std::shared_ptr<yeoul::LogitRules>> rules_;  // by slot
  std::vector<const yeoul::LogitRules*> rule_pointers_;
};

using GroupTuple = std::tuple<std::int64_t, std::int32_t, std::int32_t, std::int32_t, std::string, std::string, std::int32_t, std::int32_t, Table>;

yeoul::KVGroup to_group(const GroupTuple& g) {
  const auto& [blocks, kv_heads, key_size, value_size, k_type, v_type, window, layers, table] = g;
  yeoul::KVLayout shape{nullptr, nullptr, to_kv_type(k_type), to_kv_type(v_type), kv_heads, key_size, value_size, 0, 0, 1.0f, 1.0f};
  return {blocks, shape, window, layers, table.data(), static_cast<std::int64_t>(table.shape(1))};
}

void bind_execution(nb::module_& m) {
  m.attr("SAMPLE_PARAMS_BYTES") = sizeof(yeoul::SampleParams);
  m.attr("SAMPLE_RESULT_BYTES") = sizeof(yeoul::SampleResult);
  m.def("isa_levels", &yeoul::isa_levels, "Kernel levels that were built and run on this processor, best first.");
  m.def("uniform", &yeoul::uniform, "seed"_a, "sequence"_a, "position"_a, "The sampler's random number in [0, 1).");
  m.def(
      "packed_bytes", [](int type, std::int64_t rows, std::int64_t k) { return yeoul::packed_bytes(static_cast<yeoul::WeightType>(type), rows, k); },
      "type"_a, "rows"_a, "k"_a, "Bytes of a packed matrix. ValueError for a shape that the type cannot have.");
  nb::class_<yeoul::LogitRules>(m, "LogitRules", "What stands between one sequence's logits and its sampling.")
      .def("__init__", [](yeoul::LogitRules* self, std::int32_t vocab, double repetition, double frequency, double presence,
                          std::vector<std::pair<std::int32_t, double>> bias, std::vector<std::int32_t> end_ids, std::int64_t first_end,
                          std::vector<std::vector<std::int32_t>> bad_words, std::optional<std::vector<std::int32_t>> allowed,
                          const std::vector<std::int32_t>& prompt, const std::vector<std::int32_t>& output) {
        const bool only_allowed = allowed.has_value();
        yeoul::LogitEdits edits{repetition, frequency, presence, std::move(bias), std::move(end_ids), first_end, std::move(bad_words),
                                std::move(allowed).value_or(std::vector<std::int32_t>{}), only_allowed};
        new (self) yeoul::LogitRules(vocab, std::move(edits), prompt, output);
      }, "vocab"_a, "repetition"_a, "frequency"_a, "presence"_a, "bias"_a, "end_ids"_a, "first_end"_a, "bad_words"_a, "allowed"_a.none(), "prompt"_a, "output"_a,
           "ValueError for a token id outside [0, vocab).")
      .def("append", &yeoul::LogitRules::append, "token"_a, "The sequence's next token.")
      .def("apply", [](const yeoul::LogitRules& self, Floats logits, std::int64_t position) {
        if (logits.size() != static_cast<std::size_t>(self.vocab())) throw std::invalid_argument("the logits do not fit the vocabulary");
        std::vector<float> out(logits.size());
        self.apply(logits.data(), position, out.data());
        return to_numpy(std::move(out));
      }, "logits"_a, "position"_a, "The edited logits, for tests.");
  nb::class_<yeoul::Pool>(m, "Pool", "Threads that share the loops of a step.")
      .def(nb::init<int>(), "threads"_a)
      .def_prop_ro("threads", &yeoul::Pool::threads);
  nb::class_<yeoul::WeightArena>(m, "WeightArena", "Memory for all packed weights of a model.").def(nb::init<std::size_t>(), "bytes"_a);
  nb::class_<yeoul::PackedWeight>(m, "PackedWeight", "A matrix laid out for the kernels; its memory is the arena's.")
      .def_prop_ro("quantized", &yeoul::PackedWeight::quantized)
      .def("row", [](const yeoul::PackedWeight& w, std::int64_t row) {
        if (row < 0 || row >= w.rows) throw nb::index_error("no such row");
        std::vector<float> out(static_cast<std::size_t>(w.k));
        yeoul::unpack_row(w, row, out.data());
        return to_numpy(std::move(out));
      }, "row"_a, "The values of one row, float32.");
  m.def(
      "pack",
      [](int type, std::int64_t rows, std::int64_t k, Bytes source, yeoul::WeightArena& arena, yeoul::Pool& pool) {
        const auto t = static_cast<yeoul::WeightType>(type);
        if (source.size() != yeoul::file_bytes(t, rows, k)) throw std::invalid_argument("the matrix's bytes do not fit its shape");
        nb::gil_scoped_release unlocked;
        return yeoul::pack(t, rows, k, source.data(), arena, pool);
      },
      "type"_a, "rows"_a, "k"_a, "source"_a, "arena"_a, "pool"_a, nb::keep_alive<0, 5>(),
      "Pack a matrix of GGUF type `type` from the file's bytes. ValueError for a wrong size.");
  nb::class_<BoundProgram>(m, "Program", "A model lowered to kernel calls; views are (offset, stride in bytes, dim, gathered).")
      .def("__init__", [](BoundProgram* self, yeoul::Pool& pool, const std::string& isa, std::size_t arena_bytes, const std::vector<GroupTuple>& groups) {
        std::vector<yeoul::KVGroup> native;
        for (const auto& g : groups) native.push_back(to_group(g));
        new (self) BoundProgram(pool, isa, arena_bytes, std::move(native));
        for (const auto& g : groups) self->keep.push_back(nb::cast(std::get<8>(g)));
      }, "pool"_a, "isa"_a, "arena_bytes"_a, "groups"_a, nb::keep_alive<1, 2>())
      .def("bind", [](BoundProgram& self, Ints tokens, Ints positions, Table rows, Ints gathered, Table outputs, Masks masks, Sums pooled, RawBytes sampling, RawBytes results, RawBytes row_nan) {
        self.bind(Buffers{tokens, positions, rows, gathered, outputs, masks, pooled, sampling, results, row_nan});
      }, "tokens"_a, "positions"_a, "rows"_a, "gathered"_a, "outputs"_a, "masks"_a, "pooled"_a, "sampling"_a, "results"_a, "row_nan"_a)
      .def("set_rules", &BoundProgram::set_rules, "slot"_a, "rules"_a.none(), "How the slot's logits are edited from now on; None: not at all.")
      .def("embed", [](BoundProgram& self, yeoul::PackedWeight* weight, ViewTuple out) {
        self.program.add(yeoul::make_embed(weight, to_view(out)));
      }, "weight"_a, "out"_a, nb::keep_alive<1, 2>())
      .def("rms_norm", [](BoundProgram& self, ViewTuple x, ViewTuple out, Floats weight, float eps, int heads) {
        self.program.add(yeoul::make_rms_norm(to_view(x), to_view(out), to_vector(weight), eps, heads));
      }, "x"_a, "out"_a, "weight"_a, "eps"_a, "heads"_a)
      .def("quantize", [](BoundProgram& self, ViewTuple x, ViewTuple q8) {
        self.program.add(yeoul::make_quantize(to_view(x), to_view(q8)));
      }, "x"_a, "q8"_a)
      .def("linear", [](BoundProgram& self, ViewTuple x, ViewTuple q8, ViewTuple out, const std::vector<SegmentTuple>& segments, std::optional<ViewTuple> residual) {
        std::vector<yeoul::Segment> parts;
        for (const auto& s : segments) parts.push_back(to_segment(s, self.keep));
        yeoul::View r{};
        if (residual) r = to_view(*residual);
        self.program.add(yeoul::make_linear(to_view(x), to_view(q8), to_view(out), std::move(parts), residual ? &r : nullptr));
      }, "x"_a, "q8"_a, "out"_a, "segments"_a, "residual"_a.none())
      .def("gated_linear", [](BoundProgram& self, ViewTuple x, ViewTuple q8, ViewTuple out, const SegmentTuple& gate, const SegmentTuple& up, int act) {
        self.program.add(yeoul::make_gated_linear(to_view(x), to_view(q8), to_view(out), to_segment(gate, self.keep), to_segment(up, self.keep), static_cast<yeoul::Act>(act)));
      }, "x"_a, "q8"_a, "out"_a, "gate"_a, "up"_a, "act"_a)
      .def("rope", [](BoundProgram& self, ViewTuple x, ViewTuple out, int head_size, Matrix table, bool interleaved) {
        self.keep.push_back(nb::cast(table));
        self.program.add(yeoul::make_rope(to_view(x), to_view(out), head_size, table.data(), static_cast<int>(table.shape(1) / 2), interleaved));
      }, "x"_a, "out"_a, "head_size"_a, "table"_a, "interleaved"_a)
      .def("attention", [](BoundProgram& self, ViewTuple q, ViewTuple k, ViewTuple v, ViewTuple out, int group, int layer, float scale, float k_scale, float v_scale) {
        self.program.add(yeoul::make_attention(to_view(q), to_view(k), to_view(v), to_view(out), group, layer, scale, k_scale, v_scale));
      }, "q"_a, "k"_a, "v"_a, "out"_a, "group"_a, "layer"_a, "scale"_a, "k_scale"_a, "v_scale"_a)
      .def("gated", [](BoundProgram& self, ViewTuple x, ViewTuple out, int act) {
        self.program.add(yeoul::make_gated(to_view(x), to_view(out), static_cast<yeoul::Act>(act)));
      }, "x"_a, "out"_a, "act"_a)
      .def("add", [](BoundProgram& self, ViewTuple a, ViewTuple b, ViewTuple out) {
        self.program.add(yeoul::make_add(to_view(a), to_view(b), to_view(out)));
      }, "a"_a, "b"_a, "out"_a)
      .def("scale", [](BoundProgram& self, ViewTuple x, ViewTuple out, float factor) {
        self.program.add(yeoul::make_scale(to_view(x), to_view(out), factor));
      }, "x"_a, "out"_a, "factor"_a)
      .def("gather", [](BoundProgram& self, ViewTuple x, ViewTuple out) {
        self.program.add(yeoul::make_gather(to_view(x), to_view(out)));
      }, "x"_a, "out"_a)
      .def("logits", [](BoundProgram& self, ViewTuple x, ViewTuple q8, yeoul::PackedWeight* weight) {
        self.program.add(yeoul::make_logits(to_view(x), to_view(q8), weight));
      }, "x"_a, "q8"_a, "weight"_a, nb::keep_alive<1, 4>())
      .def("copy_block", [](BoundProgram& self, std::int64_t group, std::int64_t source, std::int64_t target) {
        self.program.copy_block(group, source, target);
      }, "group"_a, "source"_a, "target"_a, "Copy a KV block, all layers of its group. IndexError for one that does not exist.")
      .def("read_block", [](const BoundProgram& self, std::int64_t group, std::int64_t block) {
        const auto bytes = self.program.block(group, block);
        return to_numpy(std::vector<std::uint8_t>(bytes.begin(), bytes.end()));
      }, "group"_a, "block"_a, "A KV block's bytes as they lie: for each layer of the group keys, then values.")
      .def("write_block", [](BoundProgram& self, std::int64_t group, std::int64_t block, Bytes bytes) {
        const auto target = self.program.block(group, block);
        if (bytes.size() != target.size()) throw std::out_of_range("the bytes are not those of a KV block");
        std::copy_n(bytes.data(), bytes.size(), target.data());
      }, "group"_a, "block"_a, "bytes"_a, "Put back what read_block gave. IndexError for a wrong size or block.")
      .def("time", [](BoundProgram& self, bool on) { self.program.time(on); }, "on"_a, "Measure every instruction from now on, or stop.")
      .def("nanoseconds", [](const BoundProgram& self) { return to_numpy(std::vector<std::int64_t>(self.program.nanoseconds())); },
           "int64, of each instruction in the last run; empty when not measuring.")
      .def("__len__", [](const BoundProgram& self) { return self.program.size(); })
      .def("read", [](BoundProgram& self, ViewTuple view, std::int32_t rows, std::int64_t row_bytes) {
        std::vector<std::uint8_t> out(self.program.read(to_view(view), rows, row_bytes));
        return to_numpy(std::move(out));
      }, "view"_a, "rows"_a, "row_bytes"_a, "The first bytes of each of the first rows of a view, side by side: to look into a step.")
      .def("run", &BoundProgram::run, "tokens"_a, "rows"_a, "gathered"_a, "num_logits"_a, "logits"_a.none(), "first"_a, "last"_a,
           "Run instructions [first, last) on the bound buffers; with `logits` [gathered, vocab] they are left there instead of sampled.");
}

void bind_probe(nb::module_& m) {
  nb::class_<yeoul::ProbeMemory>(m, "ProbeMemory", "Memory to read from, on pages of 4 KiB or 2 MiB.")
      .def(nb::init<std::size_t, bool, yeoul::Pool&>(), "bytes"_a, "huge"_a, "pool"_a, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<yeoul::ProbeMatrix>(m, "ProbeMatrix", "A random q4_0 matrix, multiplied by the engine's own kernels.")
      .def(nb::init<yeoul::Pool&, const std::string&, std::int64_t, std::int64_t, std::int32_t>(), "pool"_a, "isa"_a, "outputs"_a, "inputs"_a, "max_rows"_a,
           nb::keep_alive<1, 2>(), nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("bytes", &yeoul::ProbeMatrix::bytes)
      .def("run", &yeoul::ProbeMatrix::run, "rows"_a, nb::call_guard<nb::gil_scoped_release>(), "Seconds of one product with `rows` rows.");
  m.def("probe_read", &yeoul::probe_read, "pool"_a, "isa"_a, "memory"_a, "bytes"_a, "passes"_a, "prefetch"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Bytes per second of all threads, each `passes` times over `bytes` of its own.");
  m.def(
      "probe_peak",
      [](yeoul::Pool& pool, const std::string& isa, bool dot, std::int64_t rounds) {
        return yeoul::probe_peak(pool, isa, dot ? yeoul::ProbePeak::dot : yeoul::ProbePeak::fma, rounds);
      },
      "pool"_a, "isa"_a, "dot"_a, "rounds"_a, nb::call_guard<nb::gil_scoped_release>(),
      "Operations per second of all threads: int8 products (`dot`) or float32 multiply-adds.");
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Yeoul's native core.";
  nb::set_leak_warnings(false);  // objects that live until the interpreter ends are no leak
  bind_execution(m);
  bind_probe(m);
  nb::class_<yeoul::SpmEncoder>(m, "SpmEncoder", "SentencePiece-style encoder by scores; immutable, thread-safe.")
      .def(nb::init<const std::vector<std::string>&, const std::vector<float>&, const std::vector<std::int32_t>&,
                    std::int32_t>(),
           "tokens"_a, "scores"_a, "kinds"_a, "unknown_id"_a)
      .def(
          "encode",
          [](const yeoul::SpmEncoder& self, nb::bytes text, bool parse_control, bool space_prefix) {
            const std::string_view view(text.c_str(), text.size());
            nb::gil_scoped_release unlocked;
            return self.encode(view, parse_control, space_prefix);
          },
          "text"_a, "parse_control"_a, "space_prefix"_a,
          "Ids of UTF-8 bytes; the GIL is released. ValueError above the length limit.");
  m.def(
      "scan_strings",
      [](Bytes data, std::uint64_t start, std::uint64_t count) {
        return to_numpy(yeoul::scan_strings(reinterpret_cast<const std::byte*>(data.data()), data.size(), start, count));
      },
      "data"_a, "start"_a, "count"_a,
      "Offsets (uint64, count + 1) of consecutive GGUF strings; IndexError when they pass the end of `data`.");
}
