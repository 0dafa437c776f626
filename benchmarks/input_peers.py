"""The pipelines of ``input_pipelines`` in Grain, Ray Data, tf.data and PyTorch, tuned as their documentation says.

tf.data runs its own operators where it has them; all others run the same functions as Swift. None of them keeps
samples by itself; only ``tf-cached`` has a cache, put by hand before the first random operator.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grain
import numpy as np
import scipy.signal
from absl import flags
from input_pipelines import BATCH, CROP, DEVIATION, FRAME, MASKED, MEAN, ROW, Case

CORES = 2
AHEAD = 64


def grain_batches(case: Case, num_threads: int, num_processes: int = 0) -> Iterator[Any]:
    """Yields batches of plain Grain, without end."""
    records = grain.MapDataset.source(case.records).seed(0)
    made = (records if case.keeps else records.shuffle()).repeat()
    for step in case.steps:
        made = made.map(step)
    if case.keeps:
        made = made.filter(case.keeps).map(lambda one: {"tokens": one["tokens"]})
    for draw in case.draws:
        made = made.random_map(draw)
    ahead = 0 if num_threads == 0 else AHEAD
    read = made.to_iter_dataset(grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=ahead))
    if case.keeps:
        read = grain.experimental.ConcatThenSplitIterDataset(read, length_struct={"tokens": ROW + 1})
    read = read.batch(BATCH, drop_remainder=True)
    if num_processes:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        read = read.mp_prefetch(grain.MultiprocessingOptions(num_processes, per_worker_buffer_size=4))
    batches = iter(read)
    try:
        yield from batches
    finally:
        batches.close()


def made(case: Case, record: Any, random: np.random.Generator | None = None) -> Any:
    """Runs all steps, and with a generator all random functions."""
    for step in case.steps:
        record = step(record)
    for draw in case.draws if random is not None else ():
        record = draw(record, random)
    return record


def rows_of(case: Case, records: Any) -> Iterator[dict[str, np.ndarray]]:
    """Yields the packed rows of records."""
    kept = np.empty(0, np.int32)
    for record in records:
        sample = made(case, record)
        if case.keeps is not None and case.keeps(sample):
            kept = np.append(kept, sample["tokens"])
            for begin in range(0, len(kept) - ROW, ROW + 1):
                yield {"tokens": kept[begin : begin + ROW + 1]}
            kept = kept[len(kept) // (ROW + 1) * (ROW + 1) :]


def torch_batches(case: Case, num_workers: int) -> Iterator[Any]:
    """Yields batches of a DataLoader, without end: workers that stay, and batches that they prefetch."""
    from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

    class Samples(Dataset):
        def __len__(self) -> int:
            return len(case.records)

        def __getitem__(self, number: int) -> Any:
            sample = made(case, case.records[number], np.random.default_rng())
            return {name: np.ascontiguousarray(array) for name, array in sample.items()}  # torch takes no mirrored ones

    class Rows(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            share = slice(None) if info is None else slice(info.id, None, info.num_workers)
            return rows_of(case, case.records[share])

    tuned: dict[str, Any] = {"prefetch_factor": 4, "persistent_workers": True} if num_workers else {}
    source = {"dataset": Rows()} if case.keeps else {"dataset": Samples(), "shuffle": True}
    loader = DataLoader(**source, batch_size=BATCH, drop_last=True, num_workers=num_workers, **tuned)
    while True:
        yield from loader


def ray_batches(case: Case) -> Iterator[Any]:
    """Yields batches of Ray Data, without end: its own parallelism, and batches ahead."""
    import ray

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars, context.execution_options.verbose_progress = False, False
    dataset = ray.data.from_items(case.records, override_num_blocks=4 * CORES)
    if case.keeps:
        dataset = dataset.map_batches(partial(_packed, case), batch_size=AHEAD)
    else:
        for step in case.steps:
            dataset = dataset.map(step)
        for draw in case.draws:
            dataset = dataset.map(partial(_drawn, draw))
        dataset = dataset.randomize_block_order()
    while True:
        yield from dataset.iter_batches(batch_size=BATCH, prefetch_batches=8, drop_last=True)


def _packed(case: Case, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    records = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    rows = [row["tokens"] for row in rows_of(case, records)]  # none, if the filter keeps none of these records
    return {"tokens": np.array(rows, np.int32).reshape(-1, ROW + 1)}


def _drawn(draw: Callable[..., dict[str, Any]], sample: Any) -> dict[str, Any]:
    return draw(sample, np.random.default_rng())


def tf_batches(case: Case, is_cached: bool = False) -> Iterator[Any]:
    """Yields batches of tf.data, without end: AUTOTUNE for what runs at a time and for what is ahead."""
    import tensorflow as tf

    tune = tf.data.AUTOTUNE
    columns = {name: [record[name] for record in case.records] for name in case.records[0]}
    dataset = tf.data.Dataset.from_tensor_slices(columns)
    fixed, drawn = {"text": _tf_text, "images": _tf_images, "audio": _tf_audio}[case.name](tf, case)
    if case.keeps is None:
        dataset = dataset.shuffle(len(case.records), reshuffle_each_iteration=True) if not is_cached else dataset
    for one in fixed:
        dataset = dataset.map(one, num_parallel_calls=tune)
    if case.keeps:
        dataset = dataset.filter(lambda sample: sample["language"] == "en").map(lambda sample: sample["tokens"])
        dataset = dataset.cache() if is_cached else dataset
        dataset = dataset.repeat().rebatch(ROW + 1, drop_remainder=True)
    else:
        dataset = dataset.cache().shuffle(len(case.records)) if is_cached else dataset
        dataset = dataset.repeat().map(drawn, num_parallel_calls=tune)
    return dataset.batch(BATCH, drop_remainder=True, num_parallel_calls=tune).prefetch(tune).as_numpy_iterator()


def _tf_text(tf: Any, case: Case) -> tuple[list[Callable[..., Any]], None]:
    def unpack(sample: Any) -> Any:
        return sample | {"text": tf.io.decode_compressed(sample["packed"], "GZIP")}

    def to_tokens(sample: Any) -> Any:
        def call(text: bytes) -> np.ndarray:
            return case.steps[1]({"text": text.decode()})["tokens"]

        tokens = tf.numpy_function(call, [sample["text"]], tf.int32)
        return {"language": sample["language"], "tokens": tf.ensure_shape(tokens, [None])}

    return [unpack, to_tokens], None


def _tf_images(tf: Any, _: Case) -> tuple[list[Callable[..., Any]], Callable[..., Any]]:
    def decode(sample: Any) -> Any:
        return tf.io.decode_jpeg(sample["file"], channels=3)

    def scale(image: Any) -> Any:
        return (tf.cast(image, tf.float32) / 255.0 - MEAN) / DEVIATION

    def drawn(image: Any) -> Any:
        return tf.image.random_flip_left_right(tf.image.random_crop(image, [CROP, CROP, 3]))

    return [decode, scale], drawn


def _tf_audio(tf: Any, _: Case) -> tuple[list[Callable[..., Any]], Callable[..., Any]]:
    def decode(sample: Any) -> Any:
        return tf.squeeze(tf.audio.decode_wav(sample["file"])[0], -1)

    def resample(sound: Any) -> Any:
        def call(one: np.ndarray) -> np.ndarray:
            return scipy.signal.resample_poly(one, 1, 2).astype(np.float32)

        return tf.ensure_shape(tf.numpy_function(call, [sound], tf.float32), [None])

    def spectrum(sound: Any) -> Any:
        return tf.math.log1p(tf.abs(tf.signal.stft(sound, FRAME, FRAME // 2, pad_end=True)))

    def drawn(spectra: Any) -> Any:
        first = tf.random.uniform([], 0, 100, tf.int32)
        places = tf.range(tf.shape(spectra)[1])
        return tf.where((places >= first) & (places < first + MASKED), 0.0, spectra)

    return [decode, resample, spectrum], drawn


SYSTEMS: dict[str, tuple[str, Callable[[Case], Iterator[Any]]]] = {
    **{f"grain-{num}": ("grain", partial(grain_batches, num_threads=num)) for num in (0, 1, 4)},
    "grain-processes": ("grain", partial(grain_batches, num_threads=1, num_processes=CORES)),
    "ray": ("ray", ray_batches),
    "tf": ("tf", tf_batches),
    "tf-cached": ("tf-cached", partial(tf_batches, is_cached=True)),
    "torch-0": ("torch", partial(torch_batches, num_workers=0)),
    "torch-2": ("torch", partial(torch_batches, num_workers=CORES)),
}
"""Settings of peers by name: the peer, and its batches."""
