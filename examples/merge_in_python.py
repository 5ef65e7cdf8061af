"""Look into a checkpoint, merge it, and read the report: `python merge_in_python.py CHECKPOINT OUT`."""

import sys

import unshard

source, output = sys.argv[1:]

checkpoint = unshard.open(source)
print(checkpoint)
name = next(iter(checkpoint))
print(name, checkpoint[name].dtype, checkpoint[name].shape, "first elements:", checkpoint[name][:1].numpy().ravel()[:4])

report = unshard.merge(source, output, dtype="bf16")
print(f"{report.tensors} tensors, {report.size:,} bytes, {len(report.rounded)} rounded")
for note in report.notes:
    print("-", note.text)
