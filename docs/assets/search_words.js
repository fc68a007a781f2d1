/* Leaves words that say nothing ("how do I") out of what is searched for: the search takes each word
 * as the beginning of one, so "how" would find "however". And adds the words of Chinese without
 * spaces: where one character is on no page, the search cannot cut the rest. */
"use strict";
(() => {
  const ENGLISH = new Set(
    ("a about after again all also am an and any are as at be because been before being between but by can " +
      "could did difference do does doing during each every for from get gets give had happen happens has have " +
      "having how i if in into is it its just let many may me mean means more most much must my need " +
      "needs no not of off on only or other our out over own same should so some still such take " +
      "takes than that the their them then there these they this those to too under until up use " +
      "used uses using versus very vs want was we were what when where which while who why will with would you " +
      "your").split(" "),
  );
  const CHINESE =
    /为什么|是什么意思|什么意思|是什么|什么是|什么|怎么办|怎么|怎样|如何|多少|哪里|哪个|哪种|是不是|是否|区别|可以|需要|应该|能不能|[的了吗呢]/gu;

  const segmenter = window.Intl?.Segmenter && new Intl.Segmenter("zh", { granularity: "word" });
  const withWords = (run) =>
    [run, ...(segmenter ? [...segmenter.segment(run)].map((found) => found.segment) : [])]
      .filter((word) => word.length > 1)
      .join(" ");

  const words = (query) => {
    const kept = query
      .replace(CHINESE, " ")
      .replace(/\p{sc=Han}+/gu, (run) => ` ${withWords(run)} `) // apart from words beside it
      .split(/\s+/)
      .map((word) => word.replace(/[?？!！.,，。;；+]+$/u, ""))
      .filter((word) => word && !ENGLISH.has(word.toLowerCase()));
    return kept.length ? kept.join(" ") : query;
  };

  // An error message that is pasted whole: its quotes and signs are no operators of the search, which
  // would look for pages that have all quoted words, and for pages without the 9 of "exitcode: -9".
  const PASTED = 7; // words
  const plain = (query) => query.replace(/(?<=^|\s)[-+]+|["'<>()[\]{}:~^*]+/g, " ");

  const QUERY = 2; // the kind of message that asks the search (mkdocs-material)
  window.Worker = class extends window.Worker {
    postMessage(message, ...rest) {
      if (message?.type === QUERY) {
        const pasted = message.data.trim().split(/\s+/).length >= PASTED;
        const data = pasted ? plain(message.data) : message.data;
        message = { ...message, data: data.includes('"') ? data : words(data) };
      }
      super.postMessage(message, ...rest);
    }
  };
})();
