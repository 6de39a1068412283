"""A GPU that is not there: tensors that claim to be on `cuda:0`, live on the CPU, and refuse to be mixed with it.

Whoever forgets a device fails here as on a real GPU. `simulated_gpu()` is a context in which `device="cuda:0"` can be used;
threads that are started inside are in it, too.

What CUDA allows is allowed: a CPU tensor of no dimensions in an operation, indices on the CPU, copies both ways. What it
refuses is refused: any other mixture, and a look at the numbers through numpy. Nothing is said of its speed or memory.
"""

import threading
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda:0")
_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._unsafe_index.Tensor}
_READ = {getattr(torch.Tensor, name) for name in ("tolist", "item", "__float__", "__int__", "__bool__", "__index__")}
_GUARDED = {  # in C++ they ask for the driver
    torch.Tensor.copy_: _aten.copy_.default,
    torch.Tensor.contiguous: _aten.contiguous.default,
    torch.Tensor.__invert__: _aten.bitwise_not.default,
    torch.Tensor.nonzero: _aten.nonzero.default,
}
_MIXED = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({})"


class SimulatedTensor(torch.Tensor):
    """Numbers on the CPU in a tensor that says it is on the GPU."""

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=GPU, requires_grad=held.requires_grad,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self):
        return f"SimulatedTensor({self.held!r})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _READ:
            return func(args[0].detach().cpu())
        if func is torch.Tensor.__getitem__ and _is_ours(args[0]):
            return _at(*_taken(*args))
        if func is torch.Tensor.__setitem__ and _is_ours(args[0]):
            return _put(*_taken(*args[:2]), args[2])
        if func in _GUARDED:
            return _run(_GUARDED[func], args, kwargs or {})
        if func is torch.Tensor.new_tensor and "device" not in (kwargs or {}):
            return SimulatedTensor(args[0].held.new_tensor(*args[1:], **(kwargs or {})))
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if func is torch.Tensor.data_ptr:
            raise AssertionError("the address of a tensor on the GPU was asked for")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _taken(tensor, index):
    """What an index with numbers, slices and `...` takes, and the tensors among the indices by their dimensions.

    In torch itself this is C++ that asks for the driver of the GPU.
    """
    index = index if isinstance(index, tuple) else (index,)
    index = tuple(SimulatedTensor(torch.tensor(i)) if isinstance(i, list) else i for i in index)
    used = sum(i.ndim if _is_mask(i) else 1 for i in index if i is not None and i is not ...)
    at = next((k for k, i in enumerate(index) if i is ...), None)
    if at is not None:
        index = (*index[:at], *[slice(None)] * (tensor.ndim - used), *index[at + 1 :])
    dim, tensors = 0, {}
    for i in index:
        if i is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif isinstance(i, slice):
            tensor, dim = _aten.slice.Tensor(tensor, dim, i.start, i.stop, i.step or 1), dim + 1
        elif isinstance(i, torch.Tensor) and i.ndim:
            tensors[dim] = i
            dim += i.ndim if _is_mask(i) else 1
        else:
            tensor = tensor.select(dim, int(i))
    return tensor, tensors


def _is_mask(index):
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def _listed(tensors):
    found, dim = [], 0
    while tensors and dim <= max(tensors):
        found.append(tensors.get(dim))
        dim += tensors[dim].ndim if dim in tensors and _is_mask(tensors[dim]) else 1
    return found


def _at(tensor, tensors):
    return _aten.index.Tensor(tensor, _listed(tensors)) if tensors else tensor


def _put(tensor, tensors, value):
    value = value if isinstance(value, torch.Tensor) else SimulatedTensor(torch.tensor(value, dtype=tensor.dtype))
    if tensors:
        _aten.index_put_.default(tensor, _listed(tensors), value.to(tensor.dtype))
    else:
        tensor.copy_(value)


def _is_ours(value):
    return isinstance(value, SimulatedTensor)


def _wrapped(value):
    return SimulatedTensor(value) if isinstance(value, torch.Tensor) and not _is_ours(value) else value


def _moved(args, kwargs):
    """`aten.to`, which inference mode does not divide into its parts."""
    given = [*args[1:], *kwargs.values()]
    like = next((g for g in given if isinstance(g, torch.Tensor)), None)
    devices = [torch.device(g) for g in given if isinstance(g, torch.device | str)]
    device = like.device if like is not None else devices[0] if devices else args[0].device
    dtypes = [g for g in given if isinstance(g, torch.dtype)]
    dtype = like.dtype if like is not None else dtypes[0] if dtypes else args[0].dtype
    if device.type == args[0].device.type and dtype == args[0].dtype:
        return args[0]
    return _run(_aten._to_copy.default, args[:1], {"dtype": dtype, "device": device})


def _run(func, args, kwargs):
    """One operation, with the device that it would run on."""
    if func.overloadpacket is _aten.to:
        return _moved(args, kwargs)
    if func is _aten._has_compatible_shallow_copy_type.default:
        return False
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    ours, others = [t for t in tensors if _is_ours(t)], [t for t in tensors if not _is_ours(t)]
    wanted = kwargs.get("device")
    wanted = None if wanted is None else torch.device(wanted)
    if ours and func not in _COPIES and func not in _INDEXED and any(t.ndim for t in others):
        raise RuntimeError(_MIXED.format(func))
    if func in _INDEXED and ours and not _is_ours(args[0]):
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor (cpu) ({func})"
        )
    kwargs = {**kwargs, "device": torch.device("cpu")} if wanted is not None else kwargs
    kwargs.pop("pin_memory", None)
    inner = tree_map(lambda t: t.held if _is_ours(t) else t, (args, kwargs))
    # Views of wrappers that were made in inference mode cannot be made; plain tensors can be used in all modes.
    with torch.inference_mode(False), torch.no_grad():
        out = func(*inner[0], **inner[1])
        first = func._schema.arguments[0].alias_info if args else None
        target = args[0] if first is not None and first.is_write else kwargs.get("out")
        if isinstance(target, torch.Tensor):  # in place
            return target
        on_gpu = wanted.type == "cuda" if wanted is not None else bool(ours)
        return tree_map(_wrapped, out) if on_gpu else out


class _Dispatch(TorchDispatchMode):
    """Sends what is made on, or copied to, the GPU to `_run`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        if any(isinstance(g, torch.device | str) and str(g).startswith("cuda") for g in given):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


def _indexed(value):
    """`cuda` as `cuda:0`, which torch would ask a driver for."""
    return GPU if isinstance(value, torch.device | str) and str(value) == "cuda" else value


class _Functions(TorchFunctionMode):
    """Functions that make tensors without the dispatcher."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = tuple(map(_indexed, args))
        kwargs = {name: _indexed(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.cuda:
            return args[0].to(GPU)
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


@contextmanager
def simulated_gpu():
    """A context in which `cuda:0` is there, in every thread that is started in it."""
    torch._C._ensureCUDADeviceGuardSet()
    before, run = torch.cuda._lazy_init, threading.Thread.run

    def run_inside(thread):
        with _Functions(), _Dispatch():
            run(thread)

    torch.cuda._lazy_init = lambda: None
    threading.Thread.run = run_inside
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # as on a GPU, tied parameters stay tied
    try:
        with _Functions(), _Dispatch():
            yield GPU
    finally:
        torch.cuda._lazy_init, threading.Thread.run = before, run
        torch.__future__.set_swap_module_params_on_conversion(swap)
