// The Python module moe_a2a._C: loading it registers the CPU kernels with torch; its functions are the control calls that
// op_host/native.py wraps. Limited API, so one build serves every Python from 3.10 on.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "experts.h"
#include "group.h"
#include "pool.h"
#include "window.h"

namespace moe_a2a {
extern thread_local std::optional<Failure> last_failure;
}

namespace {

using namespace moe_a2a;

// What a signal handler raised while an operation was waiting; handed to the Python function that called the operation.
thread_local PyObject* interrupt = nullptr;

bool python_interrupted() {
  const PyGILState_STATE state = PyGILState_Ensure();
  bool raised = false;
  // Handlers run in the main thread only; elsewhere this returns 0.
  if (PyErr_CheckSignals() != 0) {
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != nullptr && value != nullptr) PyException_SetTraceback(value, traceback);
    Py_XDECREF(interrupt);
    interrupt = value;
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    raised = true;
  }
  PyGILState_Release(state);
  return raised;
}

template <class T>
std::vector<T> items(const char* data, Py_ssize_t bytes) {
  std::vector<T> values(static_cast<size_t>(bytes) / sizeof(T));
  std::memcpy(values.data(), data, values.size() * sizeof(T));
  return values;
}

PyObject* raise_failure(const Failure& failure) {
  last_failure = failure;
  PyErr_SetString(PyExc_RuntimeError, failure.what());
  return nullptr;
}

constexpr const char* WINDOW = "moe_a2a.window";

// A mapping that its capsule and a group own together; it goes with the last of them, however creation ends.
void drop_window(PyObject* capsule) {
  delete static_cast<std::shared_ptr<Mapping>*>(PyCapsule_GetPointer(capsule, WINDOW));
}

PyObject* py_map_window(PyObject*, PyObject* args) {
  int fd = -1, fill = 0, populate = 1;
  long long bytes = 0;
  if (!PyArg_ParseTuple(args, "iLp|p", &fd, &bytes, &fill, &populate)) return nullptr;
  MapResult result{};
  Py_BEGIN_ALLOW_THREADS
  result = map_window(fd, bytes, fill != 0, populate != 0);
  Py_END_ALLOW_THREADS
  if (result.address == nullptr) {
    errno = result.error;
    return PyErr_SetFromErrno(PyExc_OSError);
  }
  auto* window = new std::shared_ptr<Mapping>(std::make_shared<Mapping>(result.address, bytes));
  PyObject* capsule = PyCapsule_New(window, WINDOW, drop_window);
  if (capsule == nullptr) {
    delete window;
    return nullptr;
  }
  return Py_BuildValue("NKNN", capsule, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(result.address)),
                       PyBool_FromLong(result.populated), PyBool_FromLong(result.collapsed));
}

// A view of mapped memory for op_host (headers) and for tests; the caller keeps the mapping alive.
PyObject* py_view_window(PyObject*, PyObject* args) {
  unsigned long long address = 0;
  long long bytes = 0;
  if (!PyArg_ParseTuple(args, "KL", &address, &bytes)) return nullptr;
  constexpr int WRITABLE = 0x200;  // PyBUF_WRITE, which the limited API names only from 3.11 on
  return PyMemoryView_FromMemory(reinterpret_cast<char*>(static_cast<uintptr_t>(address)), static_cast<Py_ssize_t>(bytes),
                                 WRITABLE);
}

PyObject* py_create_group(PyObject*, PyObject* args) {
  const char *name, *layout_data, *tiling_data, *pidfd_data;
  Py_ssize_t layout_bytes, tiling_bytes, pidfd_bytes;
  PyObject* capsules = nullptr;
  long long rank, timeout_ns, warmup_ns;
  unsigned long long first_epoch;
  if (!PyArg_ParseTuple(args, "sy#Ly#O!y#LLK", &name, &layout_data, &layout_bytes, &rank, &tiling_data, &tiling_bytes,
                        &PyList_Type, &capsules, &pidfd_data, &pidfd_bytes, &timeout_ns, &warmup_ns, &first_epoch))
    return nullptr;
  const auto params = items<int64_t>(layout_data, layout_bytes);
  const auto tiling = items<int64_t>(tiling_data, tiling_bytes);
  const auto pidfds = items<int64_t>(pidfd_data, pidfd_bytes);
  if (params.size() != LAYOUT_PARAMS || tiling.size() != TILING_PARAMS) {
    PyErr_Format(PyExc_ValueError, "create_group: %zd layout parameters and %zd tiling parameters; expected %d and %d",
                 static_cast<Py_ssize_t>(params.size()), static_cast<Py_ssize_t>(tiling.size()), int{LAYOUT_PARAMS},
                 TILING_PARAMS);
    return nullptr;
  }
  Layout layout;
  std::memcpy(layout.p, params.data(), sizeof layout.p);
  const Py_ssize_t ranks = static_cast<Py_ssize_t>(layout[WORLD_SIZE]);
  if (PyList_Size(capsules) != ranks || static_cast<Py_ssize_t>(pidfds.size()) != ranks) {
    PyErr_SetString(PyExc_ValueError, "create_group: needs a window and a pidfd for each rank");
    return nullptr;
  }
  std::vector<int> watched;
  const auto give_up = [&] {
    for (int fd : watched)
      if (fd >= 0) ::close(fd);
  };
  try {
    std::vector<std::shared_ptr<Mapping>> windows;
    for (Py_ssize_t rank = 0; rank < ranks; ++rank) {
      auto* window = static_cast<std::shared_ptr<Mapping>*>(PyCapsule_GetPointer(PyList_GetItem(capsules, rank), WINDOW));
      if (window == nullptr) return nullptr;
      windows.push_back(*window);
    }
    // The group closes its own descriptors, the caller those it opened.
    watched.reserve(pidfds.size());
    for (int64_t fd : pidfds) {
      const int copy = fd < 0 ? -1 : fcntl(static_cast<int>(fd), F_DUPFD_CLOEXEC, 0);
      if (fd >= 0 && copy < 0) {
        give_up();
        return PyErr_SetFromErrno(PyExc_OSError);
      }
      watched.push_back(copy);
    }
    add_group(std::make_shared<Group>(name, layout, rank, Tiling{{tiling[0], tiling[1], tiling[2]}, tiling[3], tiling[4], tiling[5], tiling[6],
                                             tiling[7], tiling[8], tiling[9]},
                                      std::move(windows), watched, timeout_ns, warmup_ns, first_epoch));
  } catch (const std::bad_alloc&) {
    give_up();
    return PyErr_NoMemory();
  }
  Py_RETURN_NONE;
}

PyObject* py_close_group(PyObject*, PyObject* args) {
  const char* name;
  if (!PyArg_ParseTuple(args, "s", &name)) return nullptr;
  std::shared_ptr<Group> group;
  try {
    group = find_group(name);
  } catch (const Failure&) {
    Py_RETURN_NONE;  // closed before
  }
  // Another thread may be inside a call and hold the group's lock while it waits for the interpreter.
  Py_BEGIN_ALLOW_THREADS
  group->close();
  remove_group(name);
  group.reset();
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject* py_abort_call(PyObject*, PyObject* args) {
  const char *name, *text;
  int kind;
  if (!PyArg_ParseTuple(args, "sis", &name, &kind, &text)) return nullptr;
  std::optional<Failure> failure;
  Py_BEGIN_ALLOW_THREADS
  try {
    const auto group = find_group(name);
    const Group::Call call(*group, "moe_a2a.dispatch");
    group->abort_call(static_cast<FailureKind>(kind), text);
  } catch (const Failure& error) {
    failure = error;
  } catch (const std::bad_alloc&) {
    failure = Failure(FailureKind::OUT_OF_MEMORY, "moe_a2a: no memory");
  }
  Py_END_ALLOW_THREADS
  if (failure) return raise_failure(*failure);
  Py_RETURN_NONE;
}

// Closes a handle without rows to give: the ranks that wait for some raise PeerAborted with this text.
PyObject* py_refuse_combine(PyObject*, PyObject* args) {
  const char *name, *handle_data, *text;
  Py_ssize_t handle_bytes;
  int kind;
  if (!PyArg_ParseTuple(args, "sy#is", &name, &handle_data, &handle_bytes, &kind, &text)) return nullptr;
  const auto handle = items<int64_t>(handle_data, handle_bytes);
  std::optional<Failure> failure;
  Py_BEGIN_ALLOW_THREADS
  try {
    const auto group = find_group(name);
    const Group::Call call(*group, "moe_a2a.combine");
    Group::CombineInput input;
    input.handle = handle.data();
    input.handle_words = static_cast<int64_t>(handle.size());
    input.bad_y = text;
    input.bad_kind = static_cast<FailureKind>(kind);
    group->check_handle(input.handle, input.handle_words);
    group->give_rows(static_cast<uint64_t>(input.handle[handle_word::EPOCH]), input);
  } catch (const Failure& error) {
    if (error.kind != static_cast<FailureKind>(kind)) failure = error;
  } catch (const std::bad_alloc&) {
    failure = Failure(FailureKind::OUT_OF_MEMORY, "moe_a2a: no memory");
  }
  Py_END_ALLOW_THREADS
  if (failure) return raise_failure(*failure);
  Py_RETURN_NONE;
}

// (kind, text) of the last failure in this thread, or None; asking clears it.
PyObject* py_take_failure(PyObject*, PyObject*) {
  if (!last_failure) Py_RETURN_NONE;
  const Failure failure = *last_failure;
  last_failure.reset();
  return Py_BuildValue("is", static_cast<int>(failure.kind), failure.what());
}

PyObject* py_take_interrupt(PyObject*, PyObject*) {
  if (interrupt == nullptr) Py_RETURN_NONE;
  PyObject* value = interrupt;
  interrupt = nullptr;
  return value;
}

template <class T>
PyObject* as_bytes(const std::vector<T>& values) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(values.data()),
                                   static_cast<Py_ssize_t>(values.size() * sizeof(T)));
}

PyObject* py_group_stats(PyObject*, PyObject* args) {
  const char* name;
  if (!PyArg_ParseTuple(args, "s", &name)) return nullptr;
  try {
    const auto group = find_group(name);
    // Without waiting for a call that is under way: this is what tells where it hangs.
    const Counters counters = group->counters();
    const auto &waited = group->waited_ns(), &rows = group->expert_rows();
    const auto order = group->expert_order();
    const auto& matrix = group->matrix();
    const uint64_t epoch = group->epoch();
    const std::vector<int64_t> counts{counters.dispatches,        counters.combines,         counters.dispatch_in_bytes,
                                      counters.dispatch_out_bytes, counters.combine_in_bytes, counters.combine_out_bytes,
                                      counters.sent_rows,         counters.received_rows,
                                      counters.dispatch_push_bytes, counters.combine_push_bytes, counters.pushes,
                                      counters.waves};
    return Py_BuildValue("KNNNNN", static_cast<unsigned long long>(epoch), as_bytes(counts), as_bytes(waited), as_bytes(rows),
                         as_bytes(matrix), as_bytes(order));
  } catch (const Failure& failure) {
    return raise_failure(failure);
  }
}

PyObject* py_cpu_kernels(PyObject*, PyObject*) { return PyUnicode_FromString(row_kernels().name); }

PyObject* py_pool_stats(PyObject*, PyObject*) {
  const PoolStats stats = pool_stats();
  return Py_BuildValue("KKKK", static_cast<unsigned long long>(stats.held_bytes),
                       static_cast<unsigned long long>(stats.kept_bytes), static_cast<unsigned long long>(stats.takes),
                       static_cast<unsigned long long>(stats.reused));
}

PyObject* py_pool_trim(PyObject*, PyObject*) { return PyLong_FromSize_t(pool_trim()); }

PyObject* py_pool_fill(PyObject*, PyObject* args) {
  int byte = -1;
  if (!PyArg_ParseTuple(args, "i", &byte)) return nullptr;
  pool_fill(byte);
  Py_RETURN_NONE;
}

PyObject* py_widens(PyObject*, PyObject* args) {
  int bf16 = 0;
  if (!PyArg_ParseTuple(args, "p", &bf16)) return nullptr;
  bool wide = false;
  Py_BEGIN_ALLOW_THREADS
  wide = widen_products(bf16 != 0 ? Dtype::BF16 : Dtype::F16);
  Py_END_ALLOW_THREADS
  return PyBool_FromLong(wide);
}

PyMethodDef methods[] = {
    {"map_window", py_map_window, METH_VARARGS, "map_window(fd, bytes, fill, populate=True) -> (window, address, populated, collapsed)"},
    {"view_window", py_view_window, METH_VARARGS, "view_window(address, bytes) -> memoryview"},
    {"create_group", py_create_group, METH_VARARGS,
     "create_group(name, layout, rank, tiling, windows, pidfds, timeout_ns, warmup_ns, first_epoch)"},
    {"close_group", py_close_group, METH_VARARGS, "close_group(name)"},
    {"abort_call", py_abort_call, METH_VARARGS, "abort_call(name, kind, text)"},
    {"refuse_combine", py_refuse_combine, METH_VARARGS, "refuse_combine(name, handle, kind, text)"},
    {"take_failure", py_take_failure, METH_NOARGS, "take_failure() -> (kind, text) or None"},
    {"take_interrupt", py_take_interrupt, METH_NOARGS, "take_interrupt() -> exception or None"},
    {"group_stats", py_group_stats, METH_VARARGS, "group_stats(name) -> (epoch, counters, waited_ns, expert_rows, matrix, expert_order)"},
    {"widens", py_widens, METH_VARARGS, "widens(bf16) -> are products of bf16 (else fp16) made in float"},
    {"cpu_kernels", py_cpu_kernels, METH_NOARGS, "cpu_kernels() -> name of the instruction set in use"},
    {"pool_stats", py_pool_stats, METH_NOARGS, "pool_stats() -> (held_bytes, kept_bytes, takes, reused)"},
    {"pool_fill", py_pool_fill, METH_VARARGS, "pool_fill(byte): fill every block handed out (tests); -1: don't"},
    {"pool_trim", py_pool_trim, METH_NOARGS, "pool_trim() -> bytes freed"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_C", "CPU kernels of moe_a2a and their control calls.", -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C(void) {
  moe_a2a::interrupted = python_interrupted;
  return PyModule_Create(&module_def);
}
