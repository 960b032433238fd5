"""The kernels. Reached only through `dsv4_prologue.op`, launched only by `dsv4_prologue.launch`."""
