from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    raise ValueError("recorded by torch")


if __name__ == "__main__":
    main()
