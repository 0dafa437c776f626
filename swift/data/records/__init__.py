"""Records: samples of a source by number, each a mapping of fields, with the place where it comes from.

JSON lines, ArrayRecord and Parquet files, directories of Hugging Face's ``datasets``, documents of ``TextFiles``, and
records in memory. A user's own source has the four methods of ``RecordSource``.
"""
