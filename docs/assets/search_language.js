/* A page searches the pages of its own language: those in Chinese are below zh/. */
"use strict";
(() => {
  const CHINESE = document.documentElement.lang.startsWith("zh");
  const SETUP = 0; // the kind of message that brings the index (mkdocs-material)
  window.Worker = class extends window.Worker {
    postMessage(message, ...rest) {
      if (message?.type === SETUP) {
        const docs = message.data.docs.filter((each) => each.location.startsWith("zh/") === CHINESE);
        message = { ...message, data: { ...message.data, docs } };
      }
      super.postMessage(message, ...rest);
    }
  };
})();
