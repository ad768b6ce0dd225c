"""Programs that write the files a run starts from: data sets as parquet, models as Hugging Face folders."""
