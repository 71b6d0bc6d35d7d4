"""How a fused stage becomes machine code. The only package that imports llvmlite."""
