#include "record.h"

#include <algorithm>
#include <cstring>

namespace moe_a2a {
namespace {

const int32_t* words_at(const char* at) { return reinterpret_cast<const int32_t*>(at); }

}  // namespace

void write_record(const Layout& layout, char* window, int64_t source, uint64_t epoch, const CallHeader& header,
                  const void* payload, int64_t payload_bytes) {
  namespace w = record_word;
  char* record = window + layout.record_at(epoch, source);
  int32_t words[RECORD_HEADER_WORDS] = {};
  words[w::KIND] = header.kind;
  words[w::REASON] = header.reason;
  words[w::GENERATION] = static_cast<int32_t>(layout[GENERATION]);
  put64(words, w::EPOCH_LO, static_cast<int64_t>(epoch));
  words[w::TOKENS] = static_cast<int32_t>(header.tokens);
  words[w::HIDDEN] = static_cast<int32_t>(header.hidden);
  words[w::DTYPE] = header.dtype;
  words[w::WEIGHT_DTYPE] = header.weight_dtype;
  words[w::TOP_K] = static_cast<int32_t>(header.top_k);
  put64(words, w::PAD_LO, -1);
  words[w::ALIGN] = 1;
  put64(words, w::TAG_LO, header.tag);
  put64(words, w::X_LO, header.x_offset);
  words[w::X_STRIDE] = static_cast<int32_t>(header.x_stride);
  if (header.kind == kind::ABORT) words[w::TEXT_BYTES] = static_cast<int32_t>(payload_bytes);
  std::memcpy(record + layout[RECORD_HEADER], words, sizeof words);
  std::memcpy(record + layout[RECORD_PAYLOAD], payload, static_cast<size_t>(payload_bytes));
  Flags(layout.portable()).store(record + layout[RECORD_CODE], layout.code(epoch));
}

bool record_here(const Layout& layout, const char* window, int64_t source, uint64_t epoch) {
  const char* record = window + layout.record_at(epoch, source);
  return Flags(layout.portable()).holds(record + layout[RECORD_CODE], layout.code(epoch));
}

CallHeader read_record(const Layout& layout, const char* window, int64_t source, uint64_t epoch) {
  namespace w = record_word;
  const int32_t* words = words_at(window + layout.record_at(epoch, source) + layout[RECORD_HEADER]);
  CallHeader header{};
  header.kind = words[w::KIND];
  header.reason = words[w::REASON];
  header.tokens = words[w::TOKENS];
  header.hidden = words[w::HIDDEN];
  header.dtype = words[w::DTYPE];
  header.weight_dtype = words[w::WEIGHT_DTYPE];
  header.top_k = words[w::TOP_K];
  header.tag = get64(words, w::TAG_LO);
  header.x_offset = get64(words, w::X_LO);
  header.x_stride = words[w::X_STRIDE];
  return header;
}

const int32_t* record_counts(const Layout& layout, const char* window, int64_t source, uint64_t epoch) {
  return words_at(window + layout.record_at(epoch, source) + layout[RECORD_PAYLOAD]);
}

std::string record_text(const Layout& layout, const char* window, int64_t source, uint64_t epoch) {
  const char* record = window + layout.record_at(epoch, source);
  const int64_t bytes = words_at(record + layout[RECORD_HEADER])[record_word::TEXT_BYTES];
  return std::string(record + layout[RECORD_PAYLOAD],
                     static_cast<size_t>(std::clamp<int64_t>(bytes, 0, layout[RECORD_PAYLOAD_BYTES])));
}

void write_status(const Layout& layout, char* window, int64_t source, status::Status state, int32_t reason, int64_t who,
                  uint64_t epoch, phase::Phase where) {
  namespace w = status_word;
  char* cell = window + layout.status_at(source);
  int32_t words[CELL_BODY_WORDS] = {};
  words[w::REASON] = reason;
  words[w::WHO] = static_cast<int32_t>(who);
  put64(words, w::EPOCH_LO, static_cast<int64_t>(epoch));
  words[w::PHASE] = where;
  words[w::GENERATION] = static_cast<int32_t>(layout[GENERATION]);
  std::memcpy(cell + layout[STATUS_BODY], words, sizeof words);
  Flags(layout.portable()).store(cell + layout[STATUS_CODE], static_cast<uint64_t>(state));
}

StatusRead read_status(const Layout& layout, const char* window, int64_t source) {
  namespace w = status_word;
  const char* cell = window + layout.status_at(source);
  const int64_t state = Flags(layout.portable()).value(cell + layout[STATUS_CODE]);
  if (state == 0) return {0, 0, -1, 0, 0};
  const int32_t* words = words_at(cell + layout[STATUS_BODY]);
  return {static_cast<int32_t>(state), words[w::REASON], words[w::WHO], static_cast<uint64_t>(get64(words, w::EPOCH_LO)),
          words[w::PHASE]};
}

void write_progress(const Layout& layout, char* window, uint64_t epoch, phase::Phase where) {
  char* words = window + layout[PROGRESS];
  store_u64(words + 8 * progress_word::EPOCH, epoch);
  store_u64(words + 8 * progress_word::PHASE, static_cast<uint64_t>(where));
}

ProgressRead read_progress(const Layout& layout, const char* window) {
  const char* words = window + layout[PROGRESS];
  return {load_u64(words + 8 * progress_word::EPOCH), static_cast<int32_t>(load_u64(words + 8 * progress_word::PHASE))};
}

}  // namespace moe_a2a
