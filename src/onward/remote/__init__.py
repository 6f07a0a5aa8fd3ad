"""Files in object stores and on other machines, named by URLs (`s3://bucket/folder`), through fsspec."""
