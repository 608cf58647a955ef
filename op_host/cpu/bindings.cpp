// torch's side of the CPU kernels, by the LibTorch stable ABI: checks tensors, allocates outputs, calls the group.
// Schemas are defined in moe_a2a/_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "experts.h"
#include "group.h"
#include "pool.h"
#include "tensors.h"

namespace moe_a2a {

thread_local std::optional<Failure> last_failure;  // read by module.cpp

namespace {

constexpr int64_t TICKET_MAGIC = 0x6D6F655F746B7431;
constexpr int64_t TICKET_WORDS = 3;  // TICKET_MAGIC, which group, n

// What dispatch returns: x's type, or the one it was quantised to.
int64_t itemsize_of(const Group::RowType& type) { return type.quant == Quant::NONE ? itemsize(type.dtype) : 1; }

ScalarType row_scalar_type(const Group::RowType& type) {
  return type.quant == Quant::INT8       ? ScalarType::Char
         : type.quant == Quant::FP8_E4M3 ? ScalarType::Float8_e4m3fn
                                         : scalar_type(type.dtype);
}

// Shaped as the handle that dispatch returns; what it says is checked where it is used.
bool is_handle(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Long && tensor.dim() == 1 && tensor.is_contiguous();
}

std::string check_topk_idx(const char* operation, const Tensor& idx, int64_t rank, FailureKind* kind) {
  const ScalarType type = idx.scalar_type();
  if (type != ScalarType::Int && type != ScalarType::Long) {
    *kind = FailureKind::BAD_TYPE;
    return say("%s: topk_idx has dtype %s%s; expected int32 or int64", operation, type_name(idx).c_str(), on(rank).c_str());
  }
  if (idx.dim() != 2)
    return say("%s: topk_idx has shape %s%s; expected [T, K]", operation, shape(idx).c_str(), on(rank).c_str());
  return {};
}

TopkIdx topk_idx_view(const Tensor& idx) {
  return {idx.const_data_ptr(), idx.scalar_type() == ScalarType::Long, idx.size(0), idx.size(1), idx.stride(0), idx.stride(1)};
}

std::string check_weights(const char* operation, const Tensor& weights, int64_t tokens, int64_t top_k, int64_t rank,
                          FailureKind* kind) {
  if (dtype_of(weights) == Dtype::NONE) {
    *kind = FailureKind::BAD_TYPE;
    return say("%s: topk_weights has dtype %s on rank %ld; expected float32, bfloat16, float16 or float64", operation,
               type_name(weights).c_str(), rank);
  }
  if (weights.dim() != 2 || weights.size(0) != tokens || weights.size(1) != top_k)
    return say("%s: topk_weights has shape %s on rank %ld, topk_idx has [%ld, %ld]; they must be the same", operation,
               shape(weights).c_str(), rank, tokens, top_k);
  return {};
}

Weights weights_view(const Tensor& weights) {
  return {weights.const_data_ptr(), dtype_of(weights), weights.stride(0), weights.stride(1)};
}

// How a dispatch is to be done, beside its tensors.
struct DispatchOptions {
  int64_t tag = 0;
  int64_t pad_to = -1;
  int64_t align = 1;
  int64_t quant = 0;
  bool async = false;
  int64_t gradients = 0;
  const char* operation = DISPATCH;
};

std::string check_options(const char* operation, const DispatchOptions& options, int64_t rank) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (options.pad_to < -1 || options.pad_to > most)
    return say("%s: pad_to = %ld on rank %ld; expected 0 to 2**31 - 1, or none", operation, options.pad_to, rank);
  if (options.align < 1 || options.align > (1 << 20))
    return say("%s: align = %ld on rank %ld; expected 1 to 2**20", operation, options.align, rank);
  if (options.quant < 0 || options.quant > 2)
    return say("%s: quantisation %ld on rank %ld; expected 0 (none), 1 (int8) or 2 (fp8_e4m3)", operation, options.quant, rank);
  return {};
}

// Why these tensors can't be dispatched, and their views when they can.
void describe(const Group& group, const Tensor& x, const std::optional<Tensor>& idx, const std::optional<Tensor>& weights,
              const std::optional<Tensor>& routing, const DispatchOptions& options, Group::DispatchInput* input) {
  const Layout& layout = group.layout();
  const int64_t rank = group.rank();
  std::string& bad = input->bad;
  const Dtype dtype = dtype_of(x);
  if (dtype == Dtype::NONE) {
    input->bad_kind = FailureKind::BAD_TYPE;
    bad = say("%s: x has dtype %s on rank %ld; expected float32, bfloat16, float16 or float64", input->operation, type_name(x).c_str(), rank);
    return;
  }
  if (x.dim() != 2) {
    bad = say("%s: x has shape %s on rank %ld; expected [T, H]", input->operation, shape(x).c_str(), rank);
    return;
  }
  if (idx.has_value() == routing.has_value()) {
    bad = say("%s: %s on rank %ld; expected one of them", input->operation,
              idx.has_value() ? "both topk_idx and routing are given" : "neither topk_idx nor routing is given", rank);
    return;
  }
  const int64_t tokens = x.size(0), hidden = x.size(1), width = hidden * itemsize(dtype);
  int64_t top_k = 0;
  if (idx.has_value()) {
    bad = check_topk_idx(input->operation, *idx, rank, &input->bad_kind);
    if (!bad.empty()) return;
    top_k = idx->size(1);
  } else if (!is_handle(*routing)) {
    input->bad_kind = FailureKind::BAD_TYPE;
    bad = say("%s: routing on rank %ld must be the handle that dispatch returned", input->operation, rank);
    return;
  } else {
    input->routing = static_cast<const int64_t*>(routing->const_data_ptr());
    input->routing_words = routing->size(0);
    if (input->routing_words >= HANDLE_HEADER_WORDS) top_k = input->routing[handle_word::TOP_K];
  }
  if (idx.has_value() && idx->size(0) != tokens) {
    bad = say("%s: x has shape %s and topk_idx %s on rank %ld; both must have the same number of rows T", input->operation,
              shape(x).c_str(), shape(*idx).c_str(), rank);
  } else if (tokens > layout[MAX_TOKENS]) {
    bad = say("%s: x has T = %ld rows on rank %ld, the group was made for max_tokens = %ld; dispatch fewer at once or make the "
              "group with more",
              input->operation, tokens, rank, layout[MAX_TOKENS]);
  } else if (routing.has_value() && (top_k < 0 || top_k > layout[TOP_K])) {
    bad = say("%s: routing on rank %ld is a handle that was written to after dispatch returned it", input->operation, rank);
  } else if (top_k > layout[TOP_K]) {
    bad = say("%s: topk_idx has K = %ld columns on rank %ld, the group was made for top_k = %ld", input->operation, top_k, rank,
              layout[TOP_K]);
  } else if (width > layout[ROW_BYTES] || hidden < 1) {
    bad = say("%s: a row of x is %ld x %s = %ld bytes on rank %ld; the group's rows have 1 to %ld bytes (hidden_size x dtype)",
              input->operation, hidden, dtype_name(dtype), width, rank, layout[ROW_BYTES]);
  } else if (weights.has_value()) {
    bad = check_weights(input->operation, *weights, tokens, top_k, rank, &input->bad_kind);
  }
  if (bad.empty()) bad = check_options(input->operation, options, rank);
  // Padding is memory that is written: more than there is must not be found out by the system's killer, nor by this rank alone.
  constexpr int64_t look_from = int64_t{1} << 30;
  if (bad.empty() && options.pad_to > look_from / width && options.pad_to > free_memory() / width) {
    input->bad_kind = FailureKind::OUT_OF_MEMORY;
    bad = say("%s: pad_to = %ld rows of %ld bytes on rank %ld are more memory than this host has left (%ld bytes)", input->operation,
              options.pad_to, width, rank, free_memory());
  }
  if (!bad.empty()) return;
  input->x = {static_cast<const char*>(x.const_data_ptr()), tokens, width, x.stride(0) * itemsize(dtype)};
  input->hidden = hidden;
  input->dtype = dtype;
  if (idx.has_value()) input->idx = topk_idx_view(*idx);
  if (weights.has_value()) input->weights = weights_view(*weights);
  input->tag = options.tag;
  input->pad_to = options.pad_to;
  input->align = options.align;
  input->quant = static_cast<Quant>(options.quant);
  input->async = options.async;
}

// The first step of dispatch: what a rank tells the others. Inside a Call.
uint64_t send(Group& group, const Tensor& x, const std::optional<Tensor>& idx, const std::optional<Tensor>& weights,
              const std::optional<Tensor>& routing, const DispatchOptions& options, Tensor* packed) {
  Group::DispatchInput input;
  input.operation = options.operation;
  input.gradients = static_cast<int32_t>(options.gradients);
  *packed = with_packed_columns(options.operation, "x", x, group.rank(), &input.bad);
  if (input.bad.empty()) describe(group, *packed, idx, weights, routing, options, &input);
  else input.bad_kind = FailureKind::OUT_OF_MEMORY;
  if (packed->get() != x.get()) group.count_repacked(true, input.x.rows * input.x.row_bytes);
  return group.send_dispatch(input);
}

struct Outputs {
  Tensor rows, weights, scales, handle;
};

// The other two: what the others say, and the rows.
Outputs receive(Group& group, uint64_t epoch, bool with_scales) {
  const auto plan = group.meet_dispatch(epoch);
  try {
    const int64_t weight_bytes = itemsize(plan.weight_dtype);
    const Group::RowType type = group.row_type(epoch);
    const int64_t hidden = plan.row_bytes / itemsize_of(type);
    Tensor rows = new_output({plan.rows, hidden}, row_scalar_type(type), itemsize_of(type));
    Tensor weights = new_output({weight_bytes != 0 ? plan.rows : 0},
                                weight_bytes != 0 ? scalar_type(plan.weight_dtype) : ScalarType::Float, 8);
    std::optional<Tensor> scales;
    if (with_scales)
      scales = type.quant == Quant::FP8_E4M3 ? new_output({plan.rows, plan.scales}, ScalarType::Float, 4)
                                             : new_output({type.quant == Quant::INT8 ? plan.rows : 0}, ScalarType::Float, 4);
    Tensor handle = new_output({plan.handle_words}, ScalarType::Long, 8);
    group.receive_dispatch(plan,
                           {static_cast<char*>(rows.mutable_data_ptr()), static_cast<char*>(weights.mutable_data_ptr()),
                            scales.has_value() ? static_cast<char*>(scales->mutable_data_ptr()) : nullptr},
                           static_cast<int64_t*>(handle.mutable_data_ptr()));
    return {rows, weights, scales.has_value() ? *scales : weights, handle};
  } catch (const std::exception& error) {
    // The peers have gone on with this call; without its rows they would wait for the timeout.
    group.give_up(plan.epoch, error.what());
    throw;
  }
}

std::tuple<Tensor, Tensor, Tensor> dispatch_raw(Tensor x, Tensor topk_idx, std::optional<Tensor> topk_weights,
                                                std::string group_name, int64_t tag, int64_t pad_to, int64_t align,
                                                int64_t gradients) {
  return guarded([&] {
    const auto group = find_group(group_name);
    const Group::Call call(*group, DISPATCH);
    Tensor packed;
    const uint64_t epoch =
        send(*group, x, topk_idx, topk_weights, std::nullopt, {tag, pad_to, align, 0, false, gradients}, &packed);
    const Outputs out = receive(*group, epoch, false);
    return std::make_tuple(out.rows, out.weights, out.handle);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dispatch_full_raw(Tensor x, std::optional<Tensor> topk_idx,
                                                             std::optional<Tensor> topk_weights, std::optional<Tensor> routing,
                                                             std::string group_name, int64_t tag, int64_t pad_to, int64_t align,
                                                             int64_t quant, int64_t gradients, bool backward) {
  return guarded([&] {
    const auto group = find_group(group_name);
    const char* operation = backward ? BACKWARD : DISPATCH;
    const Group::Call call(*group, operation);
    Tensor packed;
    const uint64_t epoch =
        send(*group, x, topk_idx, topk_weights, routing, {tag, pad_to, align, quant, false, gradients, operation}, &packed);
    const Outputs out = receive(*group, epoch, true);
    return std::make_tuple(out.rows, out.weights, out.scales, out.handle);
  });
}

Tensor make_ticket(const Group& group, uint64_t epoch) {
  Tensor ticket = new_output({TICKET_WORDS}, ScalarType::Long, 8);
  auto* words = static_cast<int64_t*>(ticket.mutable_data_ptr());
  words[0] = TICKET_MAGIC;
  words[1] = group.id();
  words[2] = static_cast<int64_t>(epoch);
  return ticket;
}

// (which group, n) of a ticket.
std::pair<int64_t, uint64_t> read_ticket(const char* operation, const Tensor& ticket, int64_t rank) {
  const bool shaped = ticket.scalar_type() == ScalarType::Long && ticket.dim() == 1 && ticket.size(0) == TICKET_WORDS &&
                      ticket.is_contiguous();
  const auto* words = shaped ? static_cast<const int64_t*>(ticket.const_data_ptr()) : nullptr;
  if (words == nullptr || words[0] != TICKET_MAGIC)
    throw Failure(FailureKind::BAD_TYPE, say("%s: what is waited for on rank %ld must be the tensor that the call returned",
                                             operation, rank));
  return {words[1], static_cast<uint64_t>(words[2])};
}

Tensor dispatch_begin_raw(Tensor x, std::optional<Tensor> topk_idx, std::optional<Tensor> topk_weights,
                          std::optional<Tensor> routing, std::string group_name, int64_t tag, int64_t pad_to, int64_t align,
                          int64_t quant, int64_t gradients) {
  return guarded([&] {
    const auto group = find_group(group_name);
    const Group::Call call(*group, DISPATCH);
    Tensor packed;
    const uint64_t epoch = send(*group, x, topk_idx, topk_weights, routing, {tag, pad_to, align, quant, true, gradients}, &packed);
    return make_ticket(*group, epoch);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dispatch_wait_raw(Tensor ticket, std::string group_name) {
  return guarded([&] {
    const auto group = find_group(group_name);
    const Group::Call call(*group, DISPATCH);
    const auto [owner, epoch] = read_ticket(DISPATCH, ticket, group->rank());
    group->check_pending_dispatch(owner, epoch);
    const Outputs out = receive(*group, epoch, true);
    return std::make_tuple(out.rows, out.weights, out.scales, out.handle);
  });
}

// y [N, H] for `received` rows, or why it can't be that.
void describe_y(const Group& group, const char* operation, const Tensor& y, int64_t received, bool pairs,
                Group::CombineInput* input) {
  constexpr int64_t scalar_bytes = 8;  // SCALAR_BYTES of op_host/layout.py
  const int64_t rank = group.rank(), most = std::max(group.layout()[ROW_BYTES], pairs ? scalar_bytes : 0);
  input->dtype = dtype_of(y);
  if (input->dtype == Dtype::NONE) {
    input->bad_kind = FailureKind::BAD_TYPE;
    input->bad_y = say("%s: y has dtype %s on rank %ld; expected float32, bfloat16, float16 or float64", operation,
                       type_name(y).c_str(), rank);
  } else if (y.dim() != 2 || y.size(0) != received) {
    input->bad_y = say("%s: y has shape %s on rank %ld; expected [N, H] with N = %ld, the rows of what dispatch returned", operation,
                       shape(y).c_str(), rank, received);
  } else if (y.size(1) < 1 || y.size(1) * itemsize(input->dtype) > most) {
    input->bad_y = say("%s: a row of y is %ld x %s on rank %ld; the group's rows have 1 to %ld bytes", operation, y.size(1),
                       dtype_name(input->dtype), rank, most);
  } else {
    input->hidden = y.size(1);
    input->y = {static_cast<const char*>(y.const_data_ptr()), received, input->hidden * itemsize(input->dtype),
                y.stride(0) * itemsize(input->dtype)};
  }
}

// What combine is given, checked. Throws where the peers needn't hear of it. Inside a Call.
void describe_rows(Group& group, const Tensor& y, const Tensor& handle, Tensor* packed, Group::CombineInput* input,
                   bool pairs = false) {
  const int64_t rank = group.rank();
  if (!is_handle(handle))
    throw Failure(FailureKind::BAD_TYPE, say("%s: handle on rank %ld must be the int64 tensor that dispatch returned", COMBINE,
                                             rank));
  input->handle = static_cast<const int64_t*>(handle.const_data_ptr());
  input->handle_words = handle.size(0);
  group.check_handle(input->handle, input->handle_words);
  *packed = with_packed_columns(COMBINE, "y", y, rank, &input->bad_y);
  if (!input->bad_y.empty()) {
    input->bad_kind = FailureKind::OUT_OF_MEMORY;
  } else {
    describe_y(group, COMBINE, *packed, input->handle[handle_word::OUT_ROWS], pairs, input);
  }
  if (packed->get() != y.get()) group.count_repacked(false, input->y.rows * input->y.row_bytes);
}

// Weights for a sum of [tokens, top_k] pairs; why they can't be used goes to the input.
Weights sum_weights(const std::optional<Tensor>& topk_weights, int64_t tokens, int64_t top_k, int64_t rank,
                    Group::CombineInput* input) {
  if (!topk_weights.has_value() || !input->bad_y.empty()) return {};
  input->bad_sum = check_weights(COMBINE, *topk_weights, tokens, top_k, rank, &input->bad_kind);
  return input->bad_sum.empty() ? weights_view(*topk_weights) : Weights{};
}

// The output of a combine, or why there is none.
std::optional<Tensor> sum_output(int64_t tokens, int64_t hidden, Dtype dtype, int64_t rank, Group::CombineInput* input) {
  if (!input->bad_y.empty() || !input->bad_sum.empty()) return std::nullopt;
  try {
    return new_output({tokens, hidden}, scalar_type(dtype), itemsize(dtype));
  } catch (const std::bad_alloc&) {
    input->bad_kind = FailureKind::OUT_OF_MEMORY;
    input->bad_sum = say("%s: no memory on rank %ld for the output [%ld, %ld]", COMBINE, rank, tokens, hidden);
    return std::nullopt;
  }
}

// Gives this rank's rows and takes what is due: sums [T, H], or with `pairs` every pair's own row [T, K H].
Tensor give_and_take(Group& group, uint64_t epoch, int64_t tokens, int64_t top_k, const std::optional<Tensor>& topk_weights,
                     bool pairs, Group::CombineInput* input) {
  const Weights weights = sum_weights(topk_weights, tokens, top_k, group.rank(), input);
  std::optional<Tensor> out =
      sum_output(tokens, (pairs ? top_k : 1) * input->hidden, input->dtype, group.rank(), input);
  group.give_rows(epoch, *input);  // throws where there is no output
  group.take_rows(epoch, weights, {}, input->bad_kind, static_cast<char*>(out->mutable_data_ptr()), pairs);
  return *out;
}

Tensor combine_open(const char* operation, const Tensor& y, const Tensor& handle, const std::optional<Tensor>& topk_weights,
                    const std::string& group_name, bool pairs) {
  return guarded([&] {
    const auto group = find_group(group_name);
    const Group::Call call(*group, operation);
    Group::CombineInput input;
    Tensor packed;
    describe_rows(*group, y, handle, &packed, &input, pairs);
    return give_and_take(*group, static_cast<uint64_t>(input.handle[handle_word::EPOCH]), input.handle[handle_word::TOKENS],
                         input.handle[handle_word::TOP_K], topk_weights, pairs, &input);
  });
}

Tensor combine_raw(Tensor y, Tensor handle, std::optional<Tensor> topk_weights, std::string group_name) {
  return combine_open(COMBINE, y, handle, topk_weights, group_name, false);
}

// [T, K] of a column of values, one for each row: every pair's own, zero where dropped.
Tensor combine_pairs_raw(Tensor y, Tensor handle, std::string group_name) {
  return combine_open(BACKWARD, y, handle, std::nullopt, group_name, true);
}

// Opens a call of its own for rows that go with the routing of an older dispatch, and combines them.
Tensor combine_again_raw(Tensor y, Tensor routing, std::string group_name, int64_t tag, bool pairs) {
  return guarded([&] {
    const auto group = find_group(group_name);
    const Group::Call call(*group, BACKWARD);
    Group::DispatchInput round;
    round.operation = BACKWARD;
    round.round = true;
    round.tag = tag;
    Group::CombineInput input;
    Tensor packed;
    if (!is_handle(routing) || routing.size(0) < HANDLE_HEADER_WORDS) {
      round.bad_kind = FailureKind::BAD_TYPE;
      round.bad = say("%s: routing on rank %ld must be the handle that dispatch returned", BACKWARD, group->rank());
    } else {
      round.routing = static_cast<const int64_t*>(routing.const_data_ptr());
      round.routing_words = routing.size(0);
      packed = with_packed_columns(BACKWARD, "y", y, group->rank(), &round.bad);
      if (!round.bad.empty()) {
        round.bad_kind = FailureKind::OUT_OF_MEMORY;
      } else {
        describe_y(*group, BACKWARD, packed, round.routing[handle_word::OUT_ROWS], pairs, &input);
        round.bad = input.bad_y;
        round.bad_kind = input.bad_kind;
      }
    }
    const uint64_t epoch = group->open_round(round, input.y.rows);
    return give_and_take(*group, epoch, round.routing[handle_word::TOKENS], round.routing[handle_word::TOP_K], std::nullopt, pairs,
                         &input);
  });
}

Tensor combine_begin_raw(Tensor y, Tensor handle, std::string group_name) {
  return guarded([&] {
    const auto group = find_group(group_name);
    const Group::Call call(*group, COMBINE);
    Group::CombineInput input;
    input.async = true;
    Tensor packed;
    describe_rows(*group, y, handle, &packed, &input);
    const auto epoch = static_cast<uint64_t>(input.handle[handle_word::EPOCH]);
    group->give_rows(epoch, input);
    return make_ticket(*group, epoch);
  });
}

Tensor combine_wait_raw(Tensor ticket, std::optional<Tensor> topk_weights, std::string group_name) {
  return guarded([&] {
    const auto group = find_group(group_name);
    const Group::Call call(*group, COMBINE);
    const auto [owner, epoch] = read_ticket(COMBINE, ticket, group->rank());
    const auto shape = group->check_pending_combine(owner, epoch);
    Group::CombineInput input;
    const Weights weights = sum_weights(topk_weights, shape.tokens, shape.top_k, group->rank(), &input);
    std::optional<Tensor> out = sum_output(shape.tokens, shape.hidden, shape.dtype, group->rank(), &input);
    group->take_rows(epoch, weights, input.bad_sum, input.bad_kind,
                     out.has_value() ? static_cast<char*>(out->mutable_data_ptr()) : nullptr);
    return *out;
  });
}

std::tuple<Tensor, Tensor> send_counts_op(Tensor topk_idx, int64_t num_experts) {
  return guarded([&] {
    constexpr const char* operation = "moe_a2a.send_counts";
    FailureKind kind = FailureKind::BAD_VALUE;
    if (num_experts < 1 || num_experts > std::numeric_limits<int32_t>::max())
      throw Failure(kind, say("%s: num_experts = %ld; expected 1 to 2**31 - 1", operation, num_experts));
    const std::string bad = check_topk_idx(operation, topk_idx, -1, &kind);
    if (!bad.empty()) throw Failure(kind, bad);
    const TopkIdx idx = topk_idx_view(topk_idx);
    Tensor counts = new_output({num_experts}, ScalarType::Long, 8);
    Tensor slot = new_output({idx.tokens, idx.top_k}, ScalarType::Int, 4);
    std::vector<int32_t> narrow(static_cast<size_t>(num_experts));
    const BadId id = send_counts(idx, num_experts, narrow.data(), static_cast<int32_t*>(slot.mutable_data_ptr()), nullptr);
    if (id.found)
      throw Failure(kind, say("%s: topk_idx[%ld, %ld] = %ld is outside -1..%ld (num_experts = %ld); ids must be expert ids, or "
                              "-1 for no expert",
                              operation, id.token, id.k, id.value, num_experts - 1, num_experts));
    auto* wide = static_cast<int64_t*>(counts.mutable_data_ptr());
    for (int64_t e = 0; e < num_experts; ++e) wide[e] = narrow[static_cast<size_t>(e)];
    return std::make_tuple(counts, slot);
  });
}

void require_deleter(const char* operation) {
  if (torch_from_blob == nullptr)
    throw Failure(FailureKind::TRANSPORT_UNAVAILABLE, say("%s: needs torch 2.11 or newer", operation));
}

// Rows for the window: how wide they may be is checked before anything is multiplied.
int64_t row_width(const char* operation, const Group& group, int64_t hidden, int64_t dtype_code) {
  const auto dtype = static_cast<Dtype>(dtype_code);
  if (dtype_code < 1 || dtype_code > 4)
    throw Failure(FailureKind::BAD_TYPE, say("%s: dtype code %ld on rank %ld; expected 1 to 4", operation, dtype_code, group.rank()));
  const int64_t most = group.layout()[ROW_BYTES] / itemsize(dtype);
  if (hidden < 1 || hidden > most)
    throw Failure(FailureKind::BAD_VALUE, say("%s: hidden = %ld x %s on rank %ld; the group's rows have %ld bytes, room for 1 to %ld",
                                              operation, hidden, dtype_name(dtype), group.rank(), group.layout()[ROW_BYTES], most));
  return hidden * itemsize(dtype);
}

// What a window tensor holds on to. The slot goes back when the tensor dies, or when it couldn't be made.
struct StageOwner {
  std::shared_ptr<Group> group;
  std::shared_ptr<Mapping> window;
  int64_t slot = -1;
  ~StageOwner() {
    if (slot >= 0) group->release_stage(slot);
  }
};

Tensor wrap_window(char* data, int64_t tokens, int64_t hidden, Dtype dtype, std::unique_ptr<StageOwner> owner) {
  const int64_t stride = owner->group->layout().row_stride(hidden * itemsize(dtype)) / itemsize(dtype);
  const int64_t sizes[2] = {tokens, hidden}, strides[2] = {stride, 1};
  Tensor tensor = wrap(data, 2, sizes, strides, scalar_type(dtype),
                       [](void*, void* context) { delete static_cast<StageOwner*>(context); }, owner.get());
  owner.release();
  return tensor;
}

// [tokens, hidden] in a free x slot of the window.
Tensor window_x(int64_t tokens, int64_t hidden, int64_t dtype_code, std::string group_name) {
  return guarded([&] {
    constexpr const char* operation = "moe_a2a.EPGroup.empty";
    require_deleter(operation);
    auto owner = std::make_unique<StageOwner>();
    owner->group = find_group(group_name);
    const int64_t width = row_width(operation, *owner->group, hidden, dtype_code);
    char* data = owner->group->take_stage(tokens, width, &owner->slot, &owner->window);
    return wrap_window(data, tokens, hidden, static_cast<Dtype>(dtype_code), std::move(owner));
  });
}

// [N, hidden] in the y slot of a handle.
Tensor window_y(Tensor handle, int64_t hidden, int64_t dtype_code, std::string group_name) {
  return guarded([&] {
    constexpr const char* operation = "moe_a2a.Dispatched.empty_like_rows";
    require_deleter(operation);
    auto owner = std::make_unique<StageOwner>();
    owner->group = find_group(group_name);
    const int64_t width = row_width(operation, *owner->group, hidden, dtype_code);
    if (!is_handle(handle))
      throw Failure(FailureKind::BAD_TYPE, say("%s: handle on rank %ld must be the int64 tensor that dispatch returned", operation,
                                               owner->group->rank()));
    const auto* words = static_cast<const int64_t*>(handle.const_data_ptr());
    char* data = owner->group->rows_at(words, handle.size(0), width, &owner->window);
    if (data == nullptr)
      return new_output({words[handle_word::OUT_ROWS], hidden}, scalar_type(static_cast<Dtype>(dtype_code)),
                        itemsize(static_cast<Dtype>(dtype_code)));
    return wrap_window(data, words[handle_word::OUT_ROWS], hidden, static_cast<Dtype>(dtype_code), std::move(owner));
  });
}

// ------------------------------------------------------------------------------------------------------------ fused

// The bits of an operator's `spec`: activation, and how the parameters are laid out.
ActivationSpec activation_spec(int64_t spec, double limit, double alpha) {
  return {static_cast<Activation>(spec & 255), (spec & 256) != 0, (spec & 1024) != 0, limit, alpha};
}

ExpertParameters expert_parameters(const Tensor& up, const Tensor& down, const std::optional<Tensor>& up_bias,
                                   const std::optional<Tensor>& down_bias, int64_t spec, double limit, double alpha) {
  return {up, down, up_bias, down_bias, (spec & 512) != 0, activation_spec(spec, limit, alpha)};
}

// What a fused call tells the others.
uint64_t send_fused(Group& group, const Tensor& x, const Tensor& topk_idx, const std::optional<Tensor>& topk_weights, int64_t tag,
                    int64_t gradients, const ExpertParameters* parameters, Tensor* packed) {
  Group::DispatchInput input;
  input.operation = MOE;
  input.fused = true;
  input.gradients = static_cast<int32_t>(gradients);
  DispatchOptions options;
  options.tag = tag;
  options.operation = MOE;
  *packed = with_packed_columns(MOE, "x", x, group.rank(), &input.bad);
  if (!input.bad.empty()) {
    input.bad_kind = FailureKind::OUT_OF_MEMORY;
  } else if (group.layout().line()) {
    input.bad = say("%s: the line format of group %s has no rows that could be computed in the window", MOE, group.name().c_str());
  } else {
    describe(group, *packed, topk_idx, std::nullopt, std::nullopt, options, &input);
  }
  if (packed->get() != x.get()) group.count_repacked(true, input.x.rows * input.x.row_bytes);
  if (input.bad.empty() && topk_weights.has_value())
    input.bad = check_weights(MOE, *topk_weights, topk_idx.size(0), topk_idx.size(1), group.rank(), &input.bad_kind);
  if (input.bad.empty() && parameters != nullptr) {
    bool wrong_type = false;
    input.bad = Experts::check(*parameters, group.local_end() - group.local_begin(), input.hidden, input.dtype, group.rank(),
                               &wrong_type);
    if (!input.bad.empty()) input.bad_kind = wrong_type ? FailureKind::BAD_TYPE : FailureKind::BAD_VALUE;
  }
  return group.send_dispatch(input);
}

// After the call was sent: what of it lives in torch's memory.
struct FusedCall {
  uint64_t epoch;
  Dtype dtype;
  int64_t rows, hidden;
  std::optional<Tensor> spill;  // where more rows came than the window holds
  Tensor handle;
  Group::ExpertRows experts{};
};

FusedCall begin_fused(Group& group, uint64_t epoch) {
  const auto plan = group.meet_dispatch(epoch);
  try {
    const Dtype dtype = group.row_type(epoch).dtype;
    FusedCall call{epoch, dtype, plan.rows, plan.row_bytes / itemsize(dtype), std::nullopt,
                   new_output({plan.handle_words}, ScalarType::Long, 8)};
    if (!group.fits(epoch)) call.spill = new_output({call.rows, call.hidden}, scalar_type(dtype), itemsize(dtype));
    call.experts = group.begin_experts(
        plan, call.spill.has_value() ? static_cast<char*>(call.spill->mutable_data_ptr()) : nullptr,
        static_cast<int64_t*>(call.handle.mutable_data_ptr()));
    return call;
  } catch (const std::exception& error) {
    group.give_up(epoch, error.what());
    throw;
  }
}

struct Kept {
  Tensor rows, hidden;
};

// Computes the experts as their rows come. keep: with what backward needs.
Kept compute_experts(Group& group, const FusedCall& call, const ExpertParameters& parameters, bool keep) {
  try {
    Experts experts(parameters, call.hidden, call.dtype);
    keep = keep && group.gradients(call.epoch) != 0;
    const int64_t row_bytes = call.hidden * itemsize(call.dtype), kept_bytes = experts.width() * itemsize(experts.compute_dtype());
    Kept kept{new_output({keep ? call.rows : 0, call.hidden}, scalar_type(call.dtype), itemsize(call.dtype)),
              new_output({keep ? call.rows : 0, experts.width()}, scalar_type(experts.compute_dtype()),
                         itemsize(experts.compute_dtype()))};
    auto* rows = static_cast<char*>(kept.rows.mutable_data_ptr());
    auto* hidden = static_cast<char*>(kept.hidden.mutable_data_ptr());
    for (int64_t e; (e = group.next_expert(call.epoch)) >= 0;) {
      const int64_t begin = call.experts.offsets[e], count = call.experts.offsets[e + 1] - begin;
      char* at = call.experts.rows + begin * call.experts.stride;
      if (keep)
        group.copy_out({at, count, row_bytes, call.experts.stride}, rows + begin * row_bytes);
      experts.compute(e, at, call.experts.stride, count, keep ? hidden + begin * kept_bytes : nullptr);
    }
    return kept;
  } catch (const Failure&) {
    throw;
  } catch (const std::exception& error) {
    // The peers wait for this rank's rows: they hear why there are none, and the group stays usable.
    const bool memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
    Group::CombineInput refused;
    refused.bad_kind = memory ? FailureKind::OUT_OF_MEMORY : FailureKind::BAD_VALUE;
    refused.bad_y = say("%s, call %lu on rank %ld: %s", MOE, call.epoch, group.rank(),
                        memory ? "no memory for what the experts compute" : error.what());
    group.give_rows(call.epoch, refused);  // throws
    throw;
  }
}

Tensor combine_fused(Group& group, const FusedCall& call, const std::optional<Tensor>& topk_weights) {
  const auto* words = static_cast<const int64_t*>(call.handle.const_data_ptr());
  Group::CombineInput input;
  input.dtype = call.dtype;
  input.hidden = call.hidden;
  input.y = {call.experts.rows, call.rows, call.hidden * itemsize(call.dtype), call.experts.stride};
  return give_and_take(group, call.epoch, words[handle_word::TOKENS], words[handle_word::TOP_K], topk_weights, false, &input);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_raw(Tensor x, Tensor topk_idx, std::optional<Tensor> topk_weights, Tensor up,
                                                   Tensor down, std::optional<Tensor> up_bias, std::optional<Tensor> down_bias,
                                                   int64_t spec, double limit, double alpha, std::string group_name, int64_t tag,
                                                   int64_t gradients, bool keep) {
  return guarded([&] {
    const auto group = find_group(group_name);
    const Group::Call call(*group, MOE);
    const ExpertParameters parameters = expert_parameters(up, down, up_bias, down_bias, spec, limit, alpha);
    Tensor packed;
    const uint64_t epoch = send_fused(*group, x, topk_idx, topk_weights, tag, gradients, &parameters, &packed);
    const FusedCall fused = begin_fused(*group, epoch);
    const Kept kept = compute_experts(*group, fused, parameters, keep);
    Tensor out = combine_fused(*group, fused, topk_weights);
    return std::make_tuple(out, kept.rows, kept.hidden, fused.handle);
  });
}

// The same in parts. begin returns when this rank's rows are sent.
std::tuple<Tensor, Tensor> moe_begin_raw(Tensor x, Tensor topk_idx, std::optional<Tensor> topk_weights, std::string group_name,
                                         int64_t tag, int64_t gradients) {
  return guarded([&] {
    require_deleter(MOE);
    const auto group = find_group(group_name);
    const Group::Call call(*group, MOE);
    Tensor packed;
    const uint64_t epoch = send_fused(*group, x, topk_idx, topk_weights, tag, gradients, nullptr, &packed);
    const FusedCall fused = begin_fused(*group, epoch);
    if (fused.spill.has_value()) return std::make_tuple(*fused.spill, fused.handle);
    auto owner = std::make_unique<StageOwner>();
    owner->group = group;
    owner->window = group->own_window();
    return std::make_tuple(wrap_window(fused.experts.rows, fused.rows, fused.hidden, fused.dtype, std::move(owner)), fused.handle);
  });
}

uint64_t open_epoch(const Group& group, const Tensor& handle) {
  if (!is_handle(handle))
    throw Failure(FailureKind::BAD_TYPE, say("%s: handle on rank %ld must be the int64 tensor that begin returned", MOE, group.rank()));
  const auto* words = static_cast<const int64_t*>(handle.const_data_ptr());
  group.check_handle(words, handle.size(0), MOE);
  const auto epoch = static_cast<uint64_t>(words[handle_word::EPOCH]);
  group.check_fused(epoch);
  return epoch;
}

int64_t moe_next_raw(Tensor handle, std::string group_name) {
  return guarded([&] {
    const auto group = find_group(group_name);
    const Group::Call call(*group, MOE);
    return group->next_expert(open_epoch(*group, handle));
  });
}

std::tuple<Tensor, Tensor, Tensor> moe_finish_raw(Tensor rows, Tensor handle, std::optional<Tensor> topk_weights, Tensor up,
                                                  Tensor down, std::optional<Tensor> up_bias, std::optional<Tensor> down_bias,
                                                  int64_t spec, double limit, double alpha, std::string group_name, bool keep) {
  return guarded([&] {
    const auto group = find_group(group_name);
    const Group::Call call(*group, MOE);
    const uint64_t epoch = open_epoch(*group, handle);
    const ExpertParameters parameters = expert_parameters(up, down, up_bias, down_bias, spec, limit, alpha);
    const Dtype dtype = group->row_type(epoch).dtype;
    const auto* words = static_cast<const int64_t*>(handle.const_data_ptr());
    const bool theirs = dtype_of(rows) == dtype && rows.dim() == 2 && rows.size(0) == words[handle_word::OUT_ROWS] &&
                        rows.size(1) == group->call_hidden(epoch) && (group->fits(epoch) || rows.is_contiguous());
    if (!theirs)
      throw Failure(FailureKind::BAD_VALUE, say("%s: rows on rank %ld must be the tensor that begin returned", MOE, group->rank()));
    FusedCall fused{epoch, dtype, rows.size(0), rows.size(1), std::nullopt, handle};
    if (!group->fits(epoch)) fused.spill = rows;
    fused.experts = group->expert_rows(epoch, static_cast<char*>(rows.mutable_data_ptr()));
    bool wrong_type = false;
    const std::string bad = Experts::check(parameters, group->local_end() - group->local_begin(), fused.hidden, dtype, group->rank(),
                                           &wrong_type);
    if (!bad.empty()) {
      Group::CombineInput refused;
      refused.bad_kind = wrong_type ? FailureKind::BAD_TYPE : FailureKind::BAD_VALUE;
      refused.bad_y = bad;
      group->give_rows(epoch, refused);  // throws
    }
    const Kept kept = compute_experts(*group, fused, parameters, keep);
    Tensor out = combine_fused(*group, fused, topk_weights);
    return std::make_tuple(out, kept.rows, kept.hidden);
  });
}

// An activation forward and backward: hidden [N, W], grad [N, I] -> (act(hidden) [N, I], the gradient of hidden).
std::tuple<Tensor, Tensor> activation_backward_raw(Tensor hidden, Tensor grad, int64_t spec, double limit, double alpha) {
  return guarded([&] {
    const ActivationSpec activation = activation_spec(spec, limit, alpha);
    const Dtype dtype = dtype_of(hidden);
    const bool fits = dtype != Dtype::NONE && dtype_of(grad) == dtype && hidden.dim() == 2 && grad.dim() == 2 &&
                      hidden.is_contiguous() && grad.is_contiguous() && hidden.size(0) == grad.size(0) &&
                      hidden.size(1) == (activation.gated ? 2 : 1) * grad.size(1);
    if (!fits)
      throw Failure(FailureKind::BAD_VALUE, say("%s: hidden %s of %s and its gradient %s of %s don't go together", MOE,
                                                shape(hidden).c_str(), type_name(hidden).c_str(), shape(grad).c_str(),
                                                type_name(grad).c_str()));
    Tensor out = new_output({grad.size(0), grad.size(1)}, scalar_type(dtype), itemsize(dtype));
    Tensor back = new_output({hidden.size(0), hidden.size(1)}, scalar_type(dtype), itemsize(dtype));
    row_kernels().activate_backward[static_cast<int>(dtype)](activation, hidden.const_data_ptr(), grad.const_data_ptr(),
                                                             grad.size(0), grad.size(1), out.mutable_data_ptr(),
                                                             back.mutable_data_ptr());
    return std::make_tuple(out, back);
  });
}

// Backward of all experts: grads, rows and back [N, H], weights [N] or none, hidden [N, W] or [0, W] -> the gradients of the weights
// [N] and of the parameters, empty where `needs` (up, down, up_bias, down_bias) says so; the rows' go to `back`.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> experts_backward_raw(Tensor grads, std::optional<Tensor> weights, Tensor rows,
                                                                        Tensor hidden, Tensor offsets, Tensor up, Tensor down,
                                                                        std::optional<Tensor> up_bias,
                                                                        std::optional<Tensor> down_bias, int64_t spec, double limit,
                                                                        double alpha, Tensor back, int64_t needs) {
  return guarded([&] {
    const ExpertParameters parameters = expert_parameters(up, down, up_bias, down_bias, spec, limit, alpha);
    const Dtype dtype = dtype_of(rows), parameter = dtype_of(up);
    const int64_t local = up.size(0), count = rows.size(0), H = rows.size(1);
    bool wrong_type = false;
    std::string bad = Experts::check(parameters, local, H, dtype, -1, &wrong_type);
    if (!bad.empty()) throw Failure(wrong_type ? FailureKind::BAD_TYPE : FailureKind::BAD_VALUE, bad);
    Experts experts(parameters, H, dtype);
    // These come out of handles and of what was kept, which are tensors that somebody may have written to.
    const auto is_rows = [&](const Tensor& tensor) {
      return tensor.dim() == 2 && tensor.size(0) == count && tensor.size(1) == H && dtype_of(tensor) == dtype;
    };
    bool together = grads.is_contiguous() && rows.is_contiguous() && is_rows(grads) && is_rows(back) &&
                    (count == 0 || H == 1 || back.stride(1) == 1) && offsets.scalar_type() == ScalarType::Int && offsets.dim() == 1 &&
                    offsets.is_contiguous() && offsets.size(0) == local + 1;
    if (together && weights.has_value())
      together = weights->dim() == 1 && weights->size(0) == count && weights->is_contiguous() && dtype_of(*weights) != Dtype::NONE;
    if (together && hidden.size(0) > 0)
      together = hidden.dim() == 2 && hidden.is_contiguous() && hidden.size(0) == count && hidden.size(1) == experts.width() &&
                 dtype_of(hidden) == experts.compute_dtype();
    for (int64_t e = 0; together && e < local; ++e) {
      const auto* at = static_cast<const int32_t*>(offsets.const_data_ptr());
      together = at[e] >= 0 && at[e] <= at[e + 1] && at[e + 1] <= count;
    }
    if (!together)
      throw Failure(FailureKind::BAD_VALUE, say("%s: what is kept for backward doesn't go together; a handle, or MOE_A2A_GEMM, was "
                                                "changed after the call",
                                                BACKWARD));
    const Dtype wide = experts.compute_dtype() == Dtype::F64 ? Dtype::F64 : Dtype::F32;
    Tensor values = new_output({count}, scalar_type(wide), itemsize(wide));
    const auto gradient = [&](const std::optional<Tensor>& of, int bit) {
      const bool need = (needs >> bit & 1) != 0 && of.has_value();
      if (!need) return new_output({0}, scalar_type(parameter), itemsize(parameter));
      if (of->dim() == 2) return new_output({of->size(0), of->size(1)}, scalar_type(parameter), itemsize(parameter));
      return new_output({of->size(0), of->size(1), of->size(2)}, scalar_type(parameter), itemsize(parameter));
    };
    Tensor grad_of[4] = {gradient(up, 0), gradient(down, 1), gradient(up_bias, 2), gradient(down_bias, 3)};
    const auto part = [&](int which, int64_t e) -> char* {
      if (grad_of[which].numel() == 0) return nullptr;
      return static_cast<char*>(grad_of[which].mutable_data_ptr()) + e * (grad_of[which].numel() / local) * itemsize(parameter);
    };
    const auto* at = static_cast<const int32_t*>(offsets.const_data_ptr());
    const int64_t row_bytes = H * itemsize(dtype), back_stride = back.stride(0) * itemsize(dtype);
    const int64_t kept_bytes = experts.width() * itemsize(experts.compute_dtype());
    const Dtype weight_dtype = weights.has_value() ? dtype_of(*weights) : Dtype::NONE;
    for (int64_t e = 0; e < local; ++e) {
      const int64_t begin = at[e], n = at[e + 1] - begin;
      if (n == 0) {
        for (int which = 0; which < 4; ++which)
          if (char* to = part(which, e))
            std::memset(to, 0, static_cast<size_t>(grad_of[which].numel() / local * itemsize(parameter)));
        continue;
      }
      experts.backward(
          e, n,
          {static_cast<const char*>(grads.const_data_ptr()) + begin * row_bytes,
           weights.has_value() ? static_cast<const char*>(weights->const_data_ptr()) + begin * itemsize(weight_dtype) : nullptr,
           weight_dtype, static_cast<const char*>(rows.const_data_ptr()) + begin * row_bytes,
           hidden.size(0) > 0 ? static_cast<const char*>(hidden.const_data_ptr()) + begin * kept_bytes : nullptr,
           static_cast<char*>(back.mutable_data_ptr()) + begin * back_stride, back_stride,
           static_cast<char*>(values.mutable_data_ptr()) + begin * itemsize(wide), part(0, e), part(1, e), part(2, e), part(3, e)});
    }
    return std::make_tuple(values, grad_of[0], grad_of[1], grad_of[2], grad_of[3]);
  });
}

// The experts alone, on rows that a dispatch returned: rows [N, H] in the order of offsets [E_local + 1] -> (y, first products).
std::tuple<Tensor, Tensor> experts_raw(Tensor rows, Tensor offsets, Tensor up, Tensor down, std::optional<Tensor> up_bias,
                                       std::optional<Tensor> down_bias, int64_t spec, double limit, double alpha, bool keep) {
  return guarded([&] {
    const ExpertParameters parameters = expert_parameters(up, down, up_bias, down_bias, spec, limit, alpha);
    const Dtype dtype = dtype_of(rows);
    const bool shaped = dtype != Dtype::NONE && rows.dim() == 2 && offsets.scalar_type() == ScalarType::Int && offsets.dim() == 1 &&
                        offsets.is_contiguous() && offsets.size(0) > 0;
    if (!shaped)
      throw Failure(FailureKind::BAD_TYPE, say("%s: rows %s of %s and offsets %s of %s; expected rows [N, H] of a float type and "
                                               "offsets [E_local + 1] int32",
                                               MOE, shape(rows).c_str(), type_name(rows).c_str(), shape(offsets).c_str(),
                                               type_name(offsets).c_str()));
    const int64_t local = offsets.size(0) - 1, hidden = rows.size(1);
    bool wrong_type = false;
    const std::string bad = Experts::check(parameters, local, hidden, dtype, -1, &wrong_type);
    if (!bad.empty()) throw Failure(wrong_type ? FailureKind::BAD_TYPE : FailureKind::BAD_VALUE, bad);
    const auto* at = static_cast<const int32_t*>(offsets.const_data_ptr());
    for (int64_t e = 0; e < local; ++e)
      if (at[e] > at[e + 1] || at[e] < 0 || at[e + 1] > rows.size(0))
        throw Failure(FailureKind::BAD_VALUE, say("%s: offsets %d and %d of expert %ld aren't rows of %s", MOE, at[e], at[e + 1], e,
                                                  shape(rows).c_str()));
    Experts experts(parameters, hidden, dtype);
    Tensor y = new_output({rows.size(0), hidden}, scalar_type(dtype), itemsize(dtype));
    Tensor kept = new_output({keep ? rows.size(0) : 0, experts.width()}, scalar_type(experts.compute_dtype()),
                             itemsize(experts.compute_dtype()));
    std::string unpacked;
    const Tensor packed = with_packed_columns(MOE, "rows", rows, -1, &unpacked);
    if (!unpacked.empty()) throw Failure(FailureKind::OUT_OF_MEMORY, unpacked);
    const int64_t row_bytes = hidden * itemsize(dtype), kept_bytes = experts.width() * itemsize(experts.compute_dtype());
    auto* to = static_cast<char*>(y.mutable_data_ptr());
    auto* first = static_cast<char*>(kept.mutable_data_ptr());
    const RowsView view{static_cast<const char*>(packed.const_data_ptr()), rows.size(0), row_bytes,
                        packed.stride(0) * itemsize(dtype)};
    copy_rows(row_kernels(), view, 0, view.rows, to, row_bytes, false, 0);
    for (int64_t e = 0; e < local; ++e)
      if (at[e + 1] > at[e])
        experts.compute(e, to + at[e] * row_bytes, row_bytes, at[e + 1] - at[e], keep ? first + at[e] * kept_bytes : nullptr);
    return std::make_tuple(y, kept);
  });
}

}  // namespace
}  // namespace moe_a2a

STABLE_TORCH_LIBRARY_IMPL(moe_a2a, CPU, m) {
  m.impl("dispatch_raw", TORCH_BOX(&moe_a2a::dispatch_raw));
  m.impl("dispatch_full_raw", TORCH_BOX(&moe_a2a::dispatch_full_raw));
  m.impl("dispatch_begin_raw", TORCH_BOX(&moe_a2a::dispatch_begin_raw));
  m.impl("dispatch_wait_raw", TORCH_BOX(&moe_a2a::dispatch_wait_raw));
  m.impl("combine_raw", TORCH_BOX(&moe_a2a::combine_raw));
  m.impl("combine_pairs_raw", TORCH_BOX(&moe_a2a::combine_pairs_raw));
  m.impl("combine_again_raw", TORCH_BOX(&moe_a2a::combine_again_raw));
  m.impl("moe_raw", TORCH_BOX(&moe_a2a::moe_raw));
  m.impl("moe_begin_raw", TORCH_BOX(&moe_a2a::moe_begin_raw));
  m.impl("moe_next_raw", TORCH_BOX(&moe_a2a::moe_next_raw));
  m.impl("moe_finish_raw", TORCH_BOX(&moe_a2a::moe_finish_raw));
  m.impl("activation_backward_raw", TORCH_BOX(&moe_a2a::activation_backward_raw));
  m.impl("experts_backward_raw", TORCH_BOX(&moe_a2a::experts_backward_raw));
  m.impl("experts_raw", TORCH_BOX(&moe_a2a::experts_raw));
  m.impl("combine_begin_raw", TORCH_BOX(&moe_a2a::combine_begin_raw));
  m.impl("combine_wait_raw", TORCH_BOX(&moe_a2a::combine_wait_raw));
  m.impl("send_counts", TORCH_BOX(&moe_a2a::send_counts_op));
  m.impl("window_y", TORCH_BOX(&moe_a2a::window_y));
}

// No tensor goes in, so no device decides.
STABLE_TORCH_LIBRARY_IMPL(moe_a2a, CompositeExplicitAutograd, m) { m.impl("window_x", TORCH_BOX(&moe_a2a::window_x)); }
