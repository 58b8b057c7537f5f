"""Writes tests/golden/tables: one dataset of 40 sums in verl's columns, as Parquet, as an Arrow file and as an Arrow stream,
some of them compressed.

    python tests/python/make_table_golden.py      # pyarrow 26
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

OUT = Path(__file__).parent.parent / "golden" / "tables"


def row(number: int) -> dict:
    question = f"{number}+{number}="
    return {
        "data_source": "sums/é" if number % 2 else "sums",
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": question}],
        "ability": None,
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"index": number, "split": "train", "levels": [number, 0.5]},
    }


table = pa.Table.from_pylist([row(number) for number in range(40)])
OUT.mkdir(exist_ok=True)
# Several row groups and batches; Snappy and dictionaries are what pyarrow writes by default.
pq.write_table(table, OUT / "verl.parquet", row_group_size=16)
for codec in ["zstd", "gzip"]:
    pq.write_table(table, OUT / f"{codec}.parquet", row_group_size=16, compression=codec)
with pa.OSFile(str(OUT / "verl.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
    writer.write_table(table, max_chunksize=16)
zstd = pa.ipc.IpcWriteOptions(compression="zstd")
with pa.OSFile(str(OUT / "zstd.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema, options=zstd) as writer:
    writer.write_table(table, max_chunksize=16)
# As `datasets` keeps what it has downloaded.
with pa.OSFile(str(OUT / "stream.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
    writer.write_table(table, max_chunksize=16)
